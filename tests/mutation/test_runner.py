"""The runner of mutants, tried on a planted project: what counts as killed, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import run_python

RUNNER = Path(__file__).with_name("run.py")

PROJECT = {
    "pyproject.toml": '[tool.setuptools]\npackages = ["planted", "planted.inner"]\n[tool.pytest.ini_options]\n'
    'addopts = ["--import-mode=importlib"]\n',
    "__init__.py": "def one():\n    return 1\n",
    "inner/__init__.py": "",
    "inner/sums.py": "def add(a, b):\n    total = a + b\n    return total\n\n\ndef unused():\n    return None\n",
    "tests/test_sums.py": """
import os
import subprocess
import sys
import pytest
from planted import one
from planted.inner import sums


def test_add():
    assert sums.add(1, 2) == 3


def test_add_in_a_child():
    code = "from planted.inner import sums; print(sums.add(1, 2))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "3\\n"


@pytest.mark.parametrize("b", [0, 5])
def test_each(b):
    assert sums.add(one(), b) == 1 + b


def test_unused():
    assert sums.unused() is None


@pytest.mark.skip
def test_skipped():
    assert sums.add(1, 2) == 3


@pytest.fixture
def prepared():
    assert sums.add(1, 2) == 3


def test_prepared(prepared):
    pass


@pytest.fixture
def cleared():
    yield
    assert sums.add(1, 2) == 3


def test_cleared(cleared):
    pass


def test_wrong():
    assert sums.add(1, 2) == 4
""",
}

# Each mutant: file, old, new, test, and what is said of it (nothing: it is killed).
PLANTED: dict[str, tuple[str, str, str, str, str]] = {
    "killed": ("inner/sums.py", "a + b", "a - b", "test_add", ""),
    "killed-in-a-child": ("inner/sums.py", "a + b", "a - b", "test_add_in_a_child", ""),
    "killed-in-one-case": ("inner/sums.py", "a + b", "a - b", "test_each", ""),
    "killed-in-the-named-case": ("inner/sums.py", "a + b", "a - b", "test_each[5]", ""),
    "killed-at-the-root": ("__init__.py", "return 1", "return 2", "test_each", ""),
    "killed-by-an-exception": ("inner/sums.py", "total = a + b", "raise OSError", "test_add", ""),
    "survives": ("inner/sums.py", "a + b", "b + a", "test_add", "survived: survives: "),
    "survives-this-case": ("inner/sums.py", "a + b", "a - b", "test_each[0]", "survived: survives-this-case: "),
    "survives-another-test": ("inner/sums.py", "a + b", "a - b", "test_unused", "survived: survives-another-test: "),
    "does-not-parse": ("inner/sums.py", "a + b", "a +", "test_add", "does not import: SyntaxError"),
    "does-not-import": ("inner/sums.py", "def unused", "import nosuch\ndef unused", "test_add", "ModuleNotFoundError"),
    "raises-on-import": (
        "inner/sums.py",
        "def unused",
        "1 / 0\ndef unused",
        "test_add",
        "does not import: ZeroDivision",
    ),
    "exits-on-import": ("inner/sums.py", "def unused", "exit()\ndef unused", "test_add", "does not import: SystemExit"),
    "takes-a-name-away": ("__init__.py", "def one", "def two", "test_each", "runs no test: pytest ended with code"),
    "uses-no-such-name": ("inner/sums.py", "a + b", "a + c", "test_add", "does not run: NameError"),
    "imports-late-in-vain": ("inner/sums.py", "a + b", "__import__('nosuch')", "test_add", "does not run: ModuleNot"),
    "kills-its-process": (
        "inner/sums.py",
        "a + b",
        "__import__('os')._exit(1)",
        "test_add",
        "ended with code 1 and no",
    ),
    "hangs": ("inner/sums.py", "total = a + b", "while True: pass", "test_add", "not done in 5 s"),
    "breaks-a-fixture": ("inner/sums.py", "a + b", "a - b", "test_prepared", "runs no test: pytest ended with code 1"),
    "breaks-a-clearing-up": ("inner/sums.py", "a + b", "a - b", "test_cleared", "fails outside the test"),
    "test-is-skipped": ("inner/sums.py", "a + b", "a - b", "test_skipped", "unmutated copy: runs no test"),
    "test-is-wrong": ("inner/sums.py", "a + b", "a - b", "test_wrong", "on the unmutated copy: failed"),
    "test-is-not-there": ("inner/sums.py", "a + b", "a - b", "test_nothing", "unmutated copy: runs no test"),
    "old-is-not-there": ("inner/sums.py", "a * b", "a - b", "test_add", "is in inner/sums.py 0 times, not once"),
    "old-is-there-twice": ("inner/sums.py", "total", "sum", "test_add", "is in inner/sums.py 2 times, not once"),
    "new-is-old": ("inner/sums.py", "a + b", "a + b", "test_add", "the new text is the old one"),
    "file-is-not-of-the-package": ("tests/test_sums.py", "a", "b", "test_add", "is no file of the package"),
}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[str]]:
    """The exit code and the lines of one run over every planted mutant."""
    root = tmp_path_factory.mktemp("project")
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    done = run(root, PLANTED)
    # The checkout is only read: what its files say afterwards is what they said.
    assert {name: (root / name).read_text(encoding="utf-8") for name in PROJECT} == PROJECT
    return done


def run(root: Path, planted: dict[str, tuple[str, str, str, str, str]]) -> tuple[int, list[str]]:
    tables = [
        f"[[mutant]]\nid = {name!r}\nfile = {file!r}\nold = {quoted(old)}\nnew = {quoted(new)}\n"
        f"breaks = 'the planted promise'\ntest = 'tests/test_sums.py::{test}'\n"
        for name, (file, old, new, test, _) in planted.items()
    ]
    (root / "mutants.toml").write_text("".join(tables), encoding="utf-8")
    mutants, limits = ["--mutants", str(root / "mutants.toml")], ["--limit-s", "5", "--jobs", "2"]
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # there are none to wait for in the planted tests
    done = run_python([str(RUNNER), "--root", str(root), *mutants, *limits], plugins)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def quoted(text: str) -> str:
    return f'"""{text}"""'


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mutant_is_told_for_what_it_is(tried: tuple[int, list[str]], name: str) -> None:
    """Contract 6.2: killed is only what fails the named test; what does not import or runs no test is invalid."""
    _, lines = tried
    expected = PLANTED[name][-1]
    told = [line for line in lines if line.startswith((f"invalid: {name}: ", f"survived: {name}: "))]
    assert len(told) == bool(expected)
    assert all(expected in line for line in told)


def test_run_with_survivors_fails_and_counts_them(tried: tuple[int, list[str]]) -> None:
    """Contract 6.2: one mutant that is not killed fails the run."""
    num_killed = sum(not expected for *_, expected in PLANTED.values())
    code, lines = tried
    assert (code, lines[-1]) == (1, f"{num_killed} passed, {len(PLANTED) - num_killed} failed")


def test_run_in_which_all_are_killed_succeeds(tmp_path: Path) -> None:
    """The exit code is 0 when every mutant is killed."""
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    code, lines = run(tmp_path, {"killed": PLANTED["killed"]})
    assert (code, lines[-1]) == (0, "1 passed, 0 failed")
