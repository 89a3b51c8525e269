"""Checks the table "Hooks and handlers" of docs/statistics.md against every registration in the product.

`python tests/claims/hooks.py [ROOT]` prints what is wrong and exits with 1. It reads source text only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = "docs/statistics.md"
HEADING = "## Hooks and handlers"
FLOORS = ("scheduler", "steps", "memory", "kernels")

# What makes the interpreter, the system, an event loop or another library call back later.
CALLS = {
    *("atexit.register", "signal.signal", "signal.set_wakeup_fd", "signal.setitimer", "weakref.finalize"),
    *("faulthandler.enable", "faulthandler.register", "multiprocessing.util.Finalize", "os.register_at_fork"),
    *("multiprocessing.util.register_after_fork", "sys.addaudithook", "sys.settrace", "sys.setprofile"),
    *("sys.set_asyncgen_hooks", "threading.settrace", "threading.setprofile", "asyncio.set_event_loop_policy"),
    *("structlog.configure", "structlog.configure_once", "logging.basicConfig", "warnings.filterwarnings"),
    "halt_at_exit",
    *("transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS.register",),
    *("transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register",),
}
METHODS = {"add_signal_handler", "set_exception_handler", "set_task_factory"}
ASSIGNED = {
    *("sys.excepthook", "sys.unraisablehook", "sys.displayhook", "sys.breakpointhook", "threading.excepthook"),
    *("warnings.showwarning", "warnings.formatwarning"),
}


def registrations(source: str) -> Iterator[tuple[str, str]]:
    """Yields (function, what it registers with) for each registration in a module, `__del__` methods included."""
    tree = ast.parse(source)
    yield from _registrations(tree, "", _imports(tree))


def _imports(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for, wherever in the module it is imported."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def _registrations(node: ast.AST, scope: str, imports: dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        scope = f"{scope}.{node.name}" if scope else node.name
        if node.name == "__del__":
            yield scope, "__del__"
    if isinstance(node, ast.Call):
        name = _full_name(node.func, imports)
        if name in CALLS or (isinstance(node.func, ast.Attribute) and node.func.attr in METHODS):
            yield scope, name if name in CALLS else node.func.attr  # type: ignore[attr-defined]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((scope, name) for name in (_full_name(target, imports) for target in targets) if name in ASSIGNED)
    for child in ast.iter_child_nodes(node):
        yield from _registrations(child, scope, imports)


def _full_name(node: ast.AST, imports: dict[str, str]) -> str:
    first, _, rest = ast.unparse(node).partition(".")
    return ".".join(part for part in (imports.get(first, first), rest) if part)


def found_in(root: Path) -> set[tuple[str, str]]:
    """What the product registers: ("file:function", name)."""
    paths = [*root.glob("*.py"), *(path for floor in FLOORS for path in (root / floor).rglob("*.py"))]
    return {
        (f"{path.relative_to(root).as_posix()}:{scope}", name)
        for path in paths
        for scope, name in registrations(path.read_text(encoding="utf-8"))
    }


def named_in(page: str) -> set[tuple[str, str]]:
    """What the table of the page names: the code of its first two columns."""
    section = page.partition(HEADING)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", section, re.MULTILINE)
    return {(where, name) for where, name in rows}


def problems_of(root: Path) -> list[str]:
    """Each registration that is not in the table, and each row of the table that is no registration."""
    found, named = found_in(root), named_in((root / PAGE).read_text(encoding="utf-8"))
    problems = [f"{where} registers with {name}, which {PAGE} does not name" for where, name in sorted(found - named)]
    return problems + [f"{PAGE} names {name} in {where}, which is not there" for where, name in sorted(named - found)]


def main(arguments: list[str]) -> int:
    """Prints what is wrong; returns 1 where something is."""
    problems = problems_of(Path(arguments[0]) if arguments else Path(__file__).parents[2])
    print("\n".join([*problems, f"{len(problems)} problems with hooks and handlers"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
