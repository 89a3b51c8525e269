"""Checks on source text, made from its syntax tree: who imports whom, and calls that only POSIX has."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["bare_posix_calls", "checkout", "files_of_tests", "imported_modules", "module_name", "product_files"]

_POSIX_MODULES = {"crypt", "fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
_POSIX_NAMES = {
    "os": "chown eventfd fchmod fchown fork forkpty getegid geteuid getgid getloadavg getpgid getpgrp getsid getuid "
    "killpg lockf memfd_create mkfifo nice openpty pipe2 posix_fadvise posix_fallocate posix_spawn posix_spawnp pread "
    "preadv pwrite pwritev register_at_fork sendfile setpgid setsid setuid statvfs sync sysconf uname wait3 wait4 "
    "WIFEXITED WEXITSTATUS WIFSIGNALED WTERMSIG WNOHANG",
    "signal": "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGUSR1 SIGUSR2 alarm pause pthread_kill "
    "pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait",
    "mmap": "MAP_ANON MAP_ANONYMOUS MAP_POPULATE MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    "socket": "AF_UNIX",
    "time": "CLOCK_MONOTONIC CLOCK_MONOTONIC_RAW CLOCK_PROCESS_CPUTIME_ID clock_gettime clock_gettime_ns",
    "asyncio": "open_unix_connection start_unix_server",
}
_POSIX_ATTRIBUTES = {module: frozenset(names.split()) for module, names in _POSIX_NAMES.items()}
_POSIX_PREFIXES = {"os": ("sched_", "POSIX_FADV_"), "mmap": ("MADV_",)}
# A platform that has the first has the others too, so that it guards them.
_IMPLIED = {
    "fork": "SIGCHLD SIGHUP SIGKILL SIGSTOP SIGCONT WEXITSTATUS WIFEXITED WIFSIGNALED WNOHANG WTERMSIG "
    "register_at_fork setsid wait3 wait4",
    "posix_fadvise": "POSIX_FADV_DONTNEED POSIX_FADV_NORMAL POSIX_FADV_RANDOM POSIX_FADV_SEQUENTIAL "
    "POSIX_FADV_WILLNEED",
}
# Windows' loops have these methods and raise NotImplementedError, so that only a try guards them.
_RAISING_METHODS = frozenset({"add_signal_handler", "add_reader", "add_writer"})
_CAUGHT = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "NotImplementedError"})


def checkout() -> Path:
    """Returns the root of the repository that these tests lie in."""
    return Path(__file__).parents[2]


def product_files(root: Path) -> list[Path]:
    """Returns every Python file that ships: those at the root and those of the folders of the package."""
    folders = ("scheduler", "steps", "memory", "kernels")
    return sorted([*root.glob("*.py"), *(path for folder in folders for path in (root / folder).rglob("*.py"))])


def files_of_tests(root: Path) -> list[Path]:
    """Returns every Python file under tests/."""
    return sorted((root / "tests").rglob("*.py"))


def module_name(path: Path, root: Path) -> str:
    """Returns the name of a module of the package below the root, "" for the façade."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported_modules(source: str, module: str, known: Collection[str], *, is_package: bool) -> set[str]:
    """Returns the modules of the package that `source` imports anywhere, named from the root; "" is the façade.

    Args:
        source: Text of the module.
        module: Its name below the root.
        known: Every module there is: `from . import x` is the module x where there is one, else a name of the folder.
        is_package: Whether it is an `__init__.py`, from which one dot is the folder itself.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "expertstream"]
            found.update(name.partition(".")[2] for name in names)
        elif isinstance(node, ast.ImportFrom):
            base = _import_base(node, module, is_package)
            if base is not None:
                inner = [f"{base}.{alias.name}".strip(".") for alias in node.names]
                found.update(name if name in known else base for name in inner)
    return found


def _import_base(node: ast.ImportFrom, module: str, is_package: bool) -> str | None:
    if node.level == 0:
        root, _, rest = (node.module or "").partition(".")
        return rest if root == "expertstream" else None
    up = node.level - (1 if is_package else 0)
    parts = module.split(".") if module else []
    parts = parts[: len(parts) - up] if up else parts
    return ".".join([*parts, *([node.module] if node.module else [])])


def bare_posix_calls(source: str) -> list[str]:
    """Returns "line: name" for each use of something that only POSIX has and that nothing guards.

    A guard is a `try` that catches its absence around it, or `hasattr`/`getattr` with its name (or a test of the
    platform, or a module constant made from one) in the same function, its decorators, or an enclosing one.
    """
    tree = ast.parse(source)
    constants = _guard_constants(tree)
    return list(_bare(tree, tree, constants, [], is_caught=False))


def _bare(
    node: ast.AST, tree: ast.Module, constants: dict[str, set[str]], scopes: list[ast.AST], *, is_caught: bool
) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        scopes = [*scopes, node]
    name = _posix_name(node)
    if name and not is_caught and not (name not in _RAISING_METHODS and _is_guarded(name, scopes, tree, constants)):
        yield f"{getattr(node, 'lineno', 0)}: {name}"
    if isinstance(node, ast.Try):
        caught = is_caught or any(_catches(handler) for handler in node.handlers)
        for statement in node.body:
            yield from _bare(statement, tree, constants, scopes, is_caught=caught)
        rest: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
        for other in rest:
            yield from _bare(other, tree, constants, scopes, is_caught=is_caught)
        return
    for child in ast.iter_child_nodes(node):
        yield from _bare(child, tree, constants, scopes, is_caught=is_caught)


def _posix_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        if node.attr in _RAISING_METHODS:
            return node.attr
        return _of(node.value.id, node.attr) if isinstance(node.value, ast.Name) else None
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        found = (_of(node.module, alias.name) for alias in node.names)
        return node.module if node.module in _POSIX_MODULES else next(filter(None, found), None)
    if isinstance(node, ast.Import):
        return next((alias.name for alias in node.names if alias.name in _POSIX_MODULES), None)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_context") and node.args:
        method = node.args[0]
        is_fork = isinstance(method, ast.Constant) and method.value in ("fork", "forkserver")
        return "fork" if is_fork else None
    return None


def _of(module: str, name: str) -> str | None:
    is_posix = name in _POSIX_ATTRIBUTES.get(module, ()) or name.startswith(_POSIX_PREFIXES.get(module, ("\0",)))
    return name if is_posix else None


def _is_guarded(name: str, scopes: list[ast.AST], tree: ast.Module, constants: dict[str, set[str]]) -> bool:
    # Outside every function the guard is an `if` of the module itself, or its `pytestmark`.
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
    ]
    places = scopes or [node for node in tree.body if isinstance(node, ast.If)]
    return any(_has_guard(name, place, constants) for place in [*places, *marks])


def _has_guard(name: str, scope: ast.AST, constants: dict[str, set[str]]) -> bool:
    guards = {name, *(guard for guard, implied in _IMPLIED.items() if name in implied.split())}
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            if any(isinstance(argument, ast.Constant) and argument.value in guards for argument in node.args):
                return True
        elif isinstance(node, ast.Attribute):
            if ast.unparse(node) in ("sys.platform", "os.name"):
                return True
        elif isinstance(node, ast.Name) and guards & constants.get(node.id, set()):
            return True
    return False


def _guard_constants(tree: ast.Module) -> dict[str, set[str]]:
    """Returns, for each module constant made from `hasattr` or `getattr`, the names that it tells of."""
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            for call in ast.walk(node.value):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("hasattr", "getattr"):
                    names = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
                    found.setdefault(node.targets[0].id, set()).update(map(str, names))
    return found


def _catches(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or any(
        isinstance(node, ast.Name) and node.id in _CAUGHT for node in ast.walk(handler.type)
    )
