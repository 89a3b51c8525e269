"""The shape of the repository: floors, packages, files at the root, sizes, and calls that only POSIX has."""

from __future__ import annotations

import os
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest
from source_checks import bare_posix_calls, checkout, files_of_tests, imported_modules, module_name, product_files

ROOT = checkout()
FLOORS = ("scheduler", "steps", "memory", "kernels")
MAX_LINES = 300
# Files above the ceiling, each with the reason why it is better in one piece.
LONG_FILES: dict[str, str] = {}


def imports_of_the_package() -> dict[str, set[str]]:
    files = product_files(ROOT)
    known = {module_name(path, ROOT) for path in files}
    return {
        module_name(path, ROOT): imported_modules(
            path.read_text(encoding="utf-8"),
            module_name(path, ROOT),
            known,
            is_package=path.name == "__init__.py",
        )
        for path in files
    }


def upward(importer: str, imported: str) -> bool:
    """Whether an import goes against the arrow scheduler → steps → memory → kernels, or to the façade's floor."""
    floor, target = importer.split(".")[0], imported.split(".")[0]
    if floor not in FLOORS:  # the façade and __main__ stand above every floor
        return False
    if target not in FLOORS:  # the command line may ask the façade for the version
        return floor != "scheduler"
    return FLOORS.index(target) < FLOORS.index(floor)


def cycle_in(imports: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as exc:
        return list(exc.args[1])
    return []


def test_floors_every_module_imports_only_downward() -> None:
    """Floors are scheduler → steps → memory → kernels: nobody imports upward, not even for the type checker."""
    imports = imports_of_the_package()
    assert {name.split(".")[0] for name in imports} >= set(FLOORS)
    assert [f"{a} imports {b}" for a, targets in imports.items() for b in targets if upward(a, b)] == []


def test_floors_no_module_is_in_a_circle() -> None:
    """No import goes round in a circle, inside a floor or between floors."""
    assert cycle_in(imports_of_the_package()) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ..scheduler import cli", {"scheduler.cli"}),
        ("def late():\n    from ..scheduler.cli import main", {"scheduler.cli"}),
        ("if TYPE_CHECKING:\n    import expertstream.scheduler.cli", {"scheduler.cli"}),
        ("from . import slots", {"memory.slots"}),
        ("from . import SLOTS", {"memory"}),
        ("from expertstream import open", {""}),
        ("import scheduler, numpy", set()),
    ],
)
def test_floors_planted_import_is_seen(source: str, expected: set[str]) -> None:
    """The check reads relative, absolute, late and type-checking imports alike."""
    known = {"", "scheduler.cli", "memory", "memory.slots"}
    found = imported_modules(source, "memory.store", known, is_package=False)
    assert found == expected
    assert any(upward("memory.store", name) for name in found) == ("" in found or "scheduler.cli" in found)


def test_floors_planted_circle_is_seen() -> None:
    """The check for circles finds one."""
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_packages_in_pyproject_are_the_folders_with_an_init() -> None:
    """What the wheel ships is listed by hand, so the list must be the folders that are packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {path.parent for path in product_files(ROOT) if path.name == "__init__.py"}
    expected = sorted(".".join(["expertstream", *folder.relative_to(ROOT).parts]) for folder in folders)
    assert sorted(project["tool"]["setuptools"]["packages"]) == expected


def test_version_of_the_facade_is_that_of_pyproject() -> None:
    """The version is written in two places, so they must agree."""
    import expertstream

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert expertstream.__version__ == project["project"]["version"]


def test_root_has_no_python_file_but_the_facade_and_main() -> None:
    """Any other Python file at the root would ship as a part of the package."""
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "__main__.py"]


def test_tests_have_no_init() -> None:
    """In a checkout called expertstream an __init__.py under tests makes them import the source, not the wheel."""
    assert [str(path) for path in files_of_tests(ROOT) if path.name == "__init__.py"] == []


def test_installed_package_is_the_one_under_test() -> None:
    """With EXPECT_INSTALLED set, as the continuous integration does, the tests run against the installed wheel."""
    spec = find_spec("expertstream")
    assert spec is not None
    assert spec.origin is not None
    if os.environ.get("EXPECT_INSTALLED"):
        assert Path(spec.origin).is_relative_to(sys.prefix)
        assert "site-packages" in spec.origin


def test_every_file_is_below_the_ceiling() -> None:
    """A file has at most 300 lines."""
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in [*product_files(ROOT), *files_of_tests(ROOT)]
    }
    assert {name: count for name, count in lines.items() if count > MAX_LINES and name not in LONG_FILES} == {}
    assert [name for name in LONG_FILES if lines.get(name, 0) <= MAX_LINES] == []


def test_portability_no_bare_posix_call() -> None:
    """Contract 6.1: no call that only POSIX has without a guard, in product or test code."""
    found = {
        path.relative_to(ROOT).as_posix(): bare_posix_calls(path.read_text(encoding="utf-8"))
        for path in [*product_files(ROOT), *files_of_tests(ROOT)]
    }
    assert {name: calls for name, calls in found.items() if calls} == {}


PLANTED = {
    "a call": "import os\ndef f():\n    return os.fork()",
    "at module level": "import os\nPID = os.getuid()",
    "a prefix": "import os\ndef f():\n    os.sched_setaffinity(0, {1})",
    "a signal": "import signal\ndef f():\n    signal.signal(signal.SIGHUP, None)",
    "an import of a name": "from os import preadv",
    "an import of a module": "import fcntl",
    "a loop's method": "def f(loop):\n    loop.add_signal_handler(15, print)",
    "a loop's method after hasattr": "def f(loop):\n    if hasattr(loop, 'add_signal_handler'):\n"
    "        loop.add_signal_handler(15, print)",
    "a guard of another name": "import os\ndef f():\n    if hasattr(os, 'pread'):\n        os.fork()",
    "what does not imply it": "import os\ndef f():\n    if hasattr(os, 'fork'):\n        os.posix_fadvise(0)",
    "a guard in another function": "import os\ndef g():\n    hasattr(os, 'fork')\ndef f():\n    os.fork()",
    "a try for something else": "import os\ndef f():\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "the handler of a try": "import os\ndef f():\n    try:\n        pass\n    except ImportError:\n        os.fork()",
    "a start method": "import multiprocessing as m\ndef f():\n    m.get_context('fork')",
}
GUARDED = {
    "hasattr": "import os\ndef f():\n    if hasattr(os, 'fork'):\n        os.fork()",
    "getattr": "import os\ndef f():\n    return getattr(os, 'fork', None)",
    "a try": "import os\ndef f():\n    try:\n        os.fork()\n    except AttributeError:\n        pass",
    "a try around an import": "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None",
    "a try around a loop's method": "def f(loop):\n    try:\n        loop.add_signal_handler(15, print)\n"
    "    except NotImplementedError:\n        pass",
    "the platform": "import os, sys\ndef f():\n    if sys.platform != 'win32':\n        os.fork()",
    "a module constant": "import os\nHAS = hasattr(os, 'fork')\ndef f():\n    if HAS:\n        os.fork()",
    "a decorator": "import os\n@skipif(not hasattr(os, 'fork'))\ndef f():\n    os.fork()",
    "what implies it": "import os\ndef f():\n    if hasattr(os, 'fork'):\n        os.WIFEXITED(0)",
    "pytestmark": "import os\npytestmark = skipif(not hasattr(os, 'fork'))\ndef f():\n    os.fork()",
    "a portable call": "import os, signal\ndef f():\n    os.kill(1, signal.SIGTERM)",
}


@pytest.mark.parametrize("name", PLANTED)
def test_portability_planted_bare_call_is_found(name: str) -> None:
    """Contract 6.1: the check itself is tested, with each way in which a call can be bare."""
    assert len(bare_posix_calls(PLANTED[name])) == 1


@pytest.mark.parametrize("name", GUARDED)
def test_portability_guarded_call_is_let_pass(name: str) -> None:
    """Contract 6.1: a call with its counterpart is no finding."""
    assert bare_posix_calls(GUARDED[name]) == []
