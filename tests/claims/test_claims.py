"""The register of claims holds, and its checker sees each way in which it could stop holding."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_checks import checkout

ROOT = checkout()


def script(name: str) -> Any:
    """Loads a script that lies beside this file."""
    spec = importlib.util.spec_from_file_location(f"claims_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check, hooks = script("check"), script("hooks")

FILES = {
    "__init__.py": '__all__ = ["Engine"]\n',
    "Makefile": "demo: wheel\n\ttrue\n",
    "README.md": "It streams every token that was asked for.\n",
    "docs/guide.md": "Steps never nest, whatever is on.\n",
    "docs/claims.md": "# Claims\n",
    "scheduler/engine.py": "class Engine:\n    limit: int = 3\n\n    async def generate(self):\n        return 1\n",
    "scheduler/settings.py": "class Settings:\n    slots: int = 1\n",
    "scheduler/cli.py": "from .commands.verify import verify\n\n\ndef _app(app):\n    for command in (verify, gone):\n"
    "        app.command(command)\n\n\ndef main():\n    return _app\n",
    "scheduler/commands/verify.py": 'def verify(*, per_layer=False, as_json: Flag("--json") = False):\n    return 0\n',
    "tests/support/helping.py": "def check_all(value):\n    assert value\n\n\ndef look(value):\n    return value\n",
    "tests/test_engine.py": """
import pytest
from helping import check_all, look
import helping

only_there = pytest.mark.skipif(not helping.look(1), reason="elsewhere it cannot")
NOTHING = "Engine.generate expertstream verify slots limit demo"


async def test_generate():
    assert NOTHING

@only_there
@pytest.mark.parametrize("x", [1])
def test_conditional(x):
    assert x

@pytest.mark.gpu
def test_gpu():
    assert NOTHING

@pytest.mark.skip(reason="never")
def test_skip():
    assert NOTHING

@pytest.mark.skipif(True, reason="never")
def test_skipif_true():
    assert NOTHING

@pytest.mark.parametrize("x", [])
def test_no_parameters(x):
    assert x

@pytest.mark.xfail
def test_xfail():
    assert NOTHING

def test_skips_itself():
    pytest.skip("never")
    assert NOTHING

def test_bare():
    look(NOTHING)

def test_constant():
    assert True

def test_after_return():
    return
    assert NOTHING

def test_raises():
    with pytest.raises(ValueError):
        look(NOTHING)

def test_helper_of_the_file():
    inner(NOTHING)

def inner(value):
    if value:
        inner(None)
    assert value is None

def test_helper_of_support():
    check_all(NOTHING)

def test_helper_by_module():
    helping.check_all(NOTHING)

def helper():
    assert NOTHING

class TestGroup:
    pytestmark = [pytest.mark.gpu]

    def test_inside(self):
        assert NOTHING
""",
    "tests/test_skipped.py": "import pytest\npytestmark = [pytest.mark.skip]\n\n"
    "def test_x(generate):\n    assert generate\n",
    "tests/test_elsewhere.py": "def test_other():\n    assert 1 + 1\n",
}
GENERATE = "tests/test_engine.py::test_generate"
CLAIM: dict[str, object] = {
    "id": "tokens",
    "text": "The Engine streams every token.",
    "where": "README.md",
    "quote": "streams every token",
    "entry": "expertstream.scheduler.engine:Engine.generate",
    "reach": "default",
    "tests": [GENERATE],
}
OTHER = CLAIM | {"id": "nest", "where": "docs/guide.md", "quote": "Steps never nest"}


def problems(folder: Path, *claims: dict[str, object], **files: str) -> list[str]:
    """Writes a planted checkout with these claims, and returns what the checker says of it."""
    for name, text in {**FILES, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    lines = ['pages_without_claims = ["docs/claims.md"]']
    for claim in claims:
        lines += ["[[claim]]", *(f"{key} = {value!r}" for key, value in claim.items())]
    (folder / "docs" / "claims.toml").write_text("\n".join(lines), encoding="utf-8")
    return list(check.problems_of(folder))


def test_claims_of_the_repository_hold() -> None:
    """Contract 6.3: every claim is still written where it says, pinned by a test that asserts, and reachable."""
    assert check.problems_of(ROOT) == []


def test_hooks_and_handlers_of_the_docs_are_those_of_the_source() -> None:
    """Contract 4.4: the docs name every registration there is, and no other."""
    assert hooks.problems_of(ROOT) == []


def test_checkers_run_as_scripts_without_torch() -> None:
    """Each checker is a plain script that imports nothing of the product."""
    for name in ("check", "hooks"):
        code = f"import runpy, sys; sys.argv[1:] = [{str(ROOT)!r}]\n"
        code += f"try: runpy.run_path({str(Path(__file__).with_name(name + '.py'))!r}, run_name='__main__')\n"
        code += "except SystemExit as end: print(end.code, {'torch', 'expertstream'} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.splitlines()[-1] == "0 set()", done.stdout + done.stderr


def test_planted_checkout_without_a_violation_passes(tmp_path: Path) -> None:
    """The planted checkout itself is sound, so that each violation below is the only one."""
    assert problems(tmp_path, CLAIM, OTHER) == []


SOUND: dict[str, dict[str, object]] = {
    "setting": {"entry": "setting: slots"},
    "attribute": {"entry": "expertstream.scheduler.engine:Engine.limit"},
    "command": {"entry": "command: expertstream verify --per-layer --json"},
    "the command line": {"entry": "command: expertstream"},
    "make": {"entry": "command: make demo"},
    "gpu beside another": {"tests": [GENERATE, "tests/test_engine.py::test_gpu"]},
    "gpu alone, configured": {"tests": ["tests/test_engine.py::test_gpu"], "reach": "configured"},
    "skipped under a condition": {"tests": ["tests/test_engine.py::test_conditional"]},
    "raises": {"tests": ["tests/test_engine.py::test_raises"]},
    "helper of the file": {"tests": ["tests/test_engine.py::test_helper_of_the_file"]},
    "helper of support": {"tests": ["tests/test_engine.py::test_helper_of_support"]},
    "helper by its module": {"tests": ["tests/test_engine.py::test_helper_by_module"]},
    "in a class": {"tests": ["tests/test_engine.py::TestGroup::test_inside"], "reach": "configured"},
}


@pytest.mark.parametrize("name", SOUND)
def test_planted_sound_claim_passes(tmp_path: Path, name: str) -> None:
    """What a claim may look like is let pass."""
    assert problems(tmp_path, CLAIM | SOUND[name], OTHER) == []


def with_test(name: str, **more: object) -> dict[str, object]:
    return {"tests": [f"tests/test_engine.py::{name}"], **more}


VIOLATIONS: dict[str, tuple[dict[str, object], str]] = {
    "the quote is gone": ({"quote": "streams most tokens"}, "no longer says"),
    "the file is gone": ({"where": "docs/gone.md"}, "docs/gone.md is no file"),
    "the quote is short": ({"quote": "streams"}, "fewer than 12"),
    "the test is gone": (with_test("test_gone"), "there is no test"),
    "the test's file is gone": ({"tests": ["tests/test_gone.py::test_generate"]}, "there is no test"),
    "no test but a function": (with_test("helper"), "there is no test"),
    "a file that pytest does not collect": ({"tests": ["tests/support/helping.py::test_x"]}, "there is no test"),
    "skip": (with_test("test_skip"), "skipped everywhere"),
    "skipif(True)": (with_test("test_skipif_true"), "skipped everywhere"),
    "no parameters": (with_test("test_no_parameters"), "skipped everywhere"),
    "xfail": (with_test("test_xfail"), "may fail"),
    "skips itself": (with_test("test_skips_itself"), "skipped everywhere"),
    "its module is skipped": ({"tests": ["tests/test_skipped.py::test_x"]}, "skipped everywhere"),
    "gpu alone": (with_test("test_gpu"), "only tests on a GPU"),
    "gpu alone by its class": (with_test("TestGroup::test_inside"), "only tests on a GPU"),
    "no assertion": (with_test("test_bare"), "asserts nothing"),
    "asserts a constant": (with_test("test_constant"), "asserts nothing"),
    "asserts after its return": (with_test("test_after_return"), "asserts nothing"),
    "the module is gone": ({"entry": "expertstream.scheduler.gone:Engine.generate"}, "does not exist"),
    "the class is gone": ({"entry": "expertstream.scheduler.engine:Motor.generate"}, "does not exist"),
    "the function is gone": ({"entry": "expertstream.scheduler.engine:Engine.slots"}, "does not exist"),
    "another package": ({"entry": "torch.nn:Engine.generate"}, "is no entry point"),
    "the setting is gone": ({"entry": "setting: limit"}, "there is no setting limit"),
    "the command is gone": ({"entry": "command: expertstream demo"}, "demo is no command"),
    "the flag is gone": ({"entry": "command: expertstream verify --limit"}, "has no flag --limit"),
    "the target is gone": ({"entry": "command: make verify"}, "make has no target verify"),
    "another way in": ({"tests": ["tests/test_elsewhere.py::test_other"]}, "no listed test's file names the entry"),
    "reach is no word": ({"reach": "always"}, "reach must be one of"),
    "no tests": ({"tests": []}, "none of them empty"),
    "an unknown key": ({"note": "x"}, "keys must be"),
    "the id is used twice": ({"id": "nest"}, "used twice"),
    "a page has no claim": ({"where": "docs/guide.md", "quote": "Steps never nest"}, "README.md has no claim"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_planted_violation_is_found(tmp_path: Path, name: str) -> None:
    """Contract 6.3: each way in which a claim stops holding is a problem, and one only."""
    change, message = VIOLATIONS[name]
    found = problems(tmp_path, CLAIM | change, OTHER)
    if name == "the file is gone":
        found.remove("README.md has no claim")
    assert len(found) == 1, found
    assert message in found[0]


def test_planted_exported_name_without_a_claim_is_found(tmp_path: Path) -> None:
    """Contract 6.3: every name of the façade is in a claim."""
    files = {"__init__.py": '__all__ = ["Engine", "Motor", "__version__"]\n'}
    assert problems(tmp_path, CLAIM, OTHER, **files) == ["exported name Motor has no claim"]


REGISTRATIONS = {
    "atexit": ("import atexit\ndef f():\n    atexit.register(print)", ("f", "atexit.register")),
    "an imported name": ("from atexit import register as r\ndef f():\n    r(print)", ("f", "atexit.register")),
    "an imported late": (
        "class A:\n    def f(self):\n        from multiprocessing.util import Finalize\n        Finalize(None, print)",
        ("A.f", "multiprocessing.util.Finalize"),
    ),
    "at module level": ("import os\nos.register_at_fork(before=print)", ("", "os.register_at_fork")),
    "an assignment": ("import sys\ndef f():\n    sys.excepthook = print", ("f", "sys.excepthook")),
    "a decorator's call": ("import weakref\ndef f(x):\n    weakref.finalize(x, print)", ("f", "weakref.finalize")),
    "a loop's method": ("def f(loop):\n    loop.add_signal_handler(2, print)", ("f", "add_signal_handler")),
    "a finaliser": ("class A:\n    def __del__(self):\n        pass", ("A.__del__", "__del__")),
}


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_planted_registration_is_found_and_must_be_named(tmp_path: Path, name: str) -> None:
    """Contract 4.4: each kind of registration is seen; the table must name it, and nothing that is not there."""
    source, (function, call) = REGISTRATIONS[name]
    assert list(hooks.registrations(source)) == [(function, call)]
    (tmp_path / "steps").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "steps" / "planted.py").write_text(source, encoding="utf-8")
    page = tmp_path / "docs" / "statistics.md"
    page.write_text(f"{hooks.HEADING}\n\n| `steps/other.py:f` | `{call}` | never |\n", encoding="utf-8")
    missing, stale = hooks.problems_of(tmp_path)
    assert missing.startswith(f"steps/planted.py:{function} registers with {call}, which")
    assert stale.endswith(f"names {call} in steps/other.py:f, which is not there")
    page.write_text(f"{hooks.HEADING}\n\n| `steps/planted.py:{function}` | `{call}` | now |\n", encoding="utf-8")
    assert hooks.problems_of(tmp_path) == []
