"""What importing the package does not do: each test is a process of its own, as an import cannot be undone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from environment import run_python
from source_checks import checkout, module_name, product_files

import expertstream

HEAVY = ("torch", "transformers", "cupy", "uvloop", "tokenizers", "safetensors")
# Modules that a host may import before it decides to compute anything.
STEPS = [path for path in product_files(checkout()) if path.parent.name == "steps"]
LIGHT = [
    "expertstream",
    "expertstream.scheduler.cli",
    "expertstream.scheduler.settings",
    "expertstream.memory.checkpoint",
    *(f"expertstream.{module_name(path, checkout())}" for path in STEPS),
]

PROBE = """
import asyncio, atexit, json, os, signal, sys, threading
import {third_party}

def state():
    policy = sys.modules["asyncio.events"]._event_loop_policy
    return {{
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "policy": repr(policy),
        "atexit": atexit._ncallbacks(),
        "variables": dict(os.environ),
        "structlog": structlog.is_configured(),
        "logging": (len(logging.getLogger().handlers), logging.getLogger().level),
        "finalizers": len(util._finalizer_registry),
        "after_fork": len(util._afterfork_registry),
        "hooks": (repr(sys.excepthook), repr(threading.excepthook), repr(sys.meta_path)),
    }}

import logging, structlog
from multiprocessing import util
asyncio.run(asyncio.sleep(0))  # a loop that runs makes the policy object, whoever runs it
before = state()
{body}
after = state()
print(json.dumps({{"changed": [key for key in before if before[key] != after[key]],
                  "heavy": [name for name in {heavy} if name in sys.modules]}}))
"""


def changes_of(body: str, changes: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs `body` in a process that has imported the third-party packages already, and says what it changed."""
    code = PROBE.format(third_party="anyio, cyclopts, numpy, rich.console", body=body, heavy=HEAVY)
    done = run_python(["-c", code], changes)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


NOTHING: dict[str, list[str]] = {"changed": [], "heavy": []}


def test_import_of_light_modules_starts_and_configures_nothing() -> None:
    """Contract 5.5: no torch, no thread, no loop policy, no logging configuration, no handler, nothing at exit."""
    assert changes_of("\n".join(f"import {name}" for name in LIGHT)) == NOTHING


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
        ("signal.signal(signal.SIGTERM, print)", "signals"),
        ("asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())", "policy"),
        ("atexit.register(dict)", "atexit"),
        ("os.environ['NEW'] = '1'", "variables"),
        ("structlog.configure()", "structlog"),
        ("logging.basicConfig()", "logging"),
        ("util.Finalize(None, dict, exitpriority=1)", "finalizers"),
        ("sys.excepthook = print", "hooks"),
    ],
)
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="event loop policies are deprecated there")
def test_import_probe_sees_a_planted_side_effect(body: str, changed: str) -> None:
    """Contract 5.5: the probe above fails on each side effect that it is there for."""
    assert changed in changes_of(body)["changed"]


def test_import_inside_a_running_loop_leaves_the_loop_alone() -> None:
    """Contract 5.5: importing inside a running event loop, also uvloop's, changes neither loop nor policy."""
    body = (
        "async def host():\n"
        "    loop = asyncio.get_running_loop()\n"
        "    import expertstream, expertstream.scheduler.cli\n"
        "    assert asyncio.get_running_loop() is loop\n"
        "    assert len(asyncio.all_tasks()) == 1\n"
        "{run}"
    )
    assert changes_of(body.format(run="asyncio.Runner(loop_factory=asyncio.new_event_loop).run(host())")) == NOTHING
    pytest.importorskip("uvloop")
    found = changes_of(body.format(run="import uvloop\nasyncio.Runner(loop_factory=uvloop.new_event_loop).run(host())"))
    assert found == {"changed": [], "heavy": ["uvloop"]}


@pytest.mark.parametrize("error", ["ImportError('libcublas.so.12')", "RuntimeError('no driver')"])
def test_import_with_a_broken_cupy_still_serves_what_needs_none(error: str, tmp_path: Path) -> None:
    """Contract 5.5: a CuPy that is installed and cannot be imported breaks neither import nor config nor --help."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(f"raise {error}", encoding="utf-8")
    code = (
        "import expertstream\nfrom expertstream.scheduler.cli import main\n"
        "assert [main(['config']), main(['--help']), main(['config', '--slots', 'x'])] == [0, 0, 2]"
    )
    done = run_python(["-c", code], {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr


def test_facade_names_resolve_when_they_are_used() -> None:
    """Each name of `__all__` is there, is listed by `dir`, and comes from the package."""
    for name in expertstream.__all__:
        value = getattr(expertstream, name)
        assert name == "__version__" or value.__module__.startswith("expertstream.")
        assert name in dir(expertstream)


def test_facade_unknown_name_is_an_attribute_error() -> None:
    """An unknown name of the façade is an AttributeError that says which."""
    with pytest.raises(AttributeError, match="'expertstream' has no attribute 'opne'"):
        _ = expertstream.opne


def test_facade_lists_every_lazy_name_once() -> None:
    """`__all__`, the table of homes and what the type checker sees are the same names."""
    source = (checkout() / "__init__.py").read_text(encoding="utf-8")
    checked = source.partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    assert sorted(expertstream._HOMES) == sorted(set(expertstream.__all__) - {"__version__"})
    assert [name for name, home in expertstream._HOMES.items() if f"from {home} import" not in checked] == []
    assert [name for name in expertstream._HOMES if name not in checked] == []
