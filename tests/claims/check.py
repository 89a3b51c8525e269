"""Checks the register of claims: each is still written where it says, tested by tests that assert, and reachable.

`python tests/claims/check.py [ROOT]` prints what is wrong and exits with 1. It reads source text only and imports
nothing of the product.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
KEYS = {"id", "text", "where", "quote", "tests", "entry", "reach"}
REACHES = {"default", "configured", "command"}
LEAST_QUOTE = 12
"""Characters: a shorter quote could stand anywhere."""


@dataclass(frozen=True)
class Test:
    """What the source of a test says about it."""

    is_skipped: bool
    is_gpu: bool
    does_assert: bool


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


# Tests.


def find_test(root: Path, node: str) -> Test | None:
    """What there is under a node id `tests/…/test_x.py::test_name` (or `::TestClass::test_name`), if anything."""
    name, *parts = node.split("::")
    path = root / name
    is_collected = path.name.startswith("test_") and name.startswith("tests/") and path.is_file()
    if not is_collected or not parts or not parts[-1].startswith("test"):
        return None
    marks: list[ast.expr] = []
    tree = parsed(path)
    scope: ast.Module | ast.ClassDef = tree
    for part in parts:
        marks += module_marks(scope)
        found = definition(scope, part)
        if isinstance(found, (*FUNCTIONS, ast.ClassDef)):
            marks += found.decorator_list
        if isinstance(found, FUNCTIONS) and part == parts[-1]:
            expanded = list(expand(marks, tree))
            is_skipped = any(map(always_skips, expanded)) or skips_itself(tree.body) or skips_itself(found.body)
            is_gpu = any(dotted(mark) == "pytest.mark.gpu" for mark in expanded)
            return Test(is_skipped, is_gpu, asserts(found, path, root, frozenset()))
        if not isinstance(found, ast.ClassDef):
            return None
        scope = found
    return None


def definition(scope: ast.Module | ast.ClassDef, name: str) -> ast.stmt | None:
    """The last definition of a name in a module or class: the one that counts."""
    found: ast.stmt | None = None
    for statement in scope.body:
        if isinstance(statement, (*FUNCTIONS, ast.ClassDef)) and statement.name == name:
            found = statement
        targets: list[ast.expr] = [statement.target] if isinstance(statement, ast.AnnAssign) else []
        targets += statement.targets if isinstance(statement, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found = statement
    return found


def module_marks(scope: ast.Module | ast.ClassDef) -> list[ast.expr]:
    """What `pytestmark` of a module or class is."""
    found = definition(scope, "pytestmark")
    return [found.value] if isinstance(found, ast.Assign) else []


def expand(marks: list[ast.expr], tree: ast.Module) -> Iterator[ast.expr]:
    """Yields marks with lists unrolled and module constants replaced by what they are."""
    for mark in marks:
        if isinstance(mark, (ast.List, ast.Tuple)):
            yield from expand(mark.elts, tree)
        elif isinstance(mark, ast.Name) and isinstance(found := definition(tree, mark.id), ast.Assign):
            yield from expand([found.value], tree)
        else:
            yield mark


def dotted(node: ast.AST) -> str:
    """The dotted name of an expression, or of what a call calls."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def always_skips(mark: ast.expr) -> bool:
    """Whether a mark keeps its test from failing anywhere: skip, skipif(True), xfail, no parameters."""
    name, arguments = dotted(mark), mark.args if isinstance(mark, ast.Call) else []
    if name == "pytest.mark.skipif":
        return bool(arguments) and isinstance(arguments[0], ast.Constant) and bool(arguments[0].value)
    if name == "pytest.mark.parametrize":
        return len(arguments) > 1 and isinstance(arguments[1], (ast.List, ast.Tuple)) and not arguments[1].elts
    return name in ("pytest.mark.skip", "pytest.mark.xfail")


def skips_itself(body: list[ast.stmt]) -> bool:
    """Whether a body calls `pytest.skip` or `pytest.xfail` on its way, under no condition."""
    calls = [statement.value for statement in body if isinstance(statement, ast.Expr)]
    return any(isinstance(call, ast.Call) and dotted(call) in ("pytest.skip", "pytest.xfail") for call in calls)


def asserts(function: ast.AST, path: Path, root: Path, seen: frozenset[tuple[Path, str]]) -> bool:
    """Whether a function asserts something, itself or through a helper of its file or of tests/support."""
    for node in reachable(function):
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant):
            return True
        if isinstance(node, ast.Call):
            if dotted(node) in ("pytest.raises", "pytest.warns", "pytest.fail", "pytest.deprecated_call"):
                return True
            for home, name in helpers(node, path, root):
                helper = definition(parsed(home), name)
                key = (home, name)
                if isinstance(helper, FUNCTIONS) and key not in seen and asserts(helper, home, root, seen | {key}):
                    return True
    return False


def reachable(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function up to its first unconditional return."""
    for statement in getattr(function, "body", []):
        yield from ast.walk(statement)
        if isinstance(statement, ast.Return):
            return


def helpers(call: ast.Call, path: Path, root: Path) -> Iterator[tuple[Path, str]]:
    """Yields where the function that is called may be defined: (file, name)."""
    support = root / "tests" / "support"
    imports = [node for node in parsed(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    if isinstance(call.func, ast.Name):
        yield path, call.func.id
        for node in imports:
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                home = support / f"{getattr(node, 'module', None)}.py"
                if call.func.id == (alias.asname or alias.name) and home.is_file():
                    yield home, alias.name
    elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        home = support / f"{call.func.value.id}.py"
        if home.is_file():
            yield home, call.func.attr


# Entry points.


def entry_problem(root: Path, entry: str) -> str | None:
    """What is wrong with a production entry point, if anything."""
    kind, _, rest = entry.partition(": ")
    if kind == "command":
        return command_problem(root, rest.split())
    if kind == "setting":
        settings = definition(parsed(root / "scheduler" / "settings.py"), "Settings")
        is_field = isinstance(settings, ast.ClassDef) and isinstance(definition(settings, rest), ast.AnnAssign)
        return None if is_field else f"there is no setting {rest}"
    module, _, names = entry.partition(":")
    if module.split(".")[0] != "expertstream" or not names:
        return f"{entry!r} is no entry point"
    path = root.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    scope: Any = parsed(path) if path.is_file() else None
    for name in names.split("."):
        scope = definition(scope, name) if isinstance(scope, (ast.Module, ast.ClassDef)) else None
    return None if scope is not None else f"{entry} does not exist"


def command_problem(root: Path, words: list[str]) -> str | None:
    """What is wrong with a command, `make TARGET` or `expertstream COMMAND [--flag]…`, if anything."""
    if words[0] == "make":
        makefile = (root / "Makefile").read_text(encoding="utf-8")
        return None if re.search(rf"^{words[1]}:", makefile, re.MULTILINE) else f"make has no target {words[1]}"
    tree = parsed(root / "scheduler" / "cli.py")
    if len(words) == 1:
        return None if definition(tree, "main") else "the command line has no main"
    registered = {name for name, is_there in commands(tree).items() if is_there}
    if words[1] not in registered:
        return f"{words[1]} is no command"
    home = root / "scheduler" / "commands" / f"{words[1]}.py"
    found = definition(parsed(home), words[1]) if home.is_file() else None
    if not isinstance(found, FUNCTIONS):
        return f"command {words[1]} has no function of its name"
    flags = {"--" + each.arg.replace("_", "-") for each in [*found.args.args, *found.args.kwonlyargs]}
    flags |= {str(node.value) for node in ast.walk(found.args) if isinstance(node, ast.Constant)}
    missing = [word for word in words[2:] if word not in flags]
    return f"command {words[1]} has no flag {missing[0]}" if missing else None


def commands(tree: ast.Module) -> dict[str, bool]:
    """Names that are handed to `app.command`, themselves or one after another by a loop, and whether imported."""
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    loops = {
        node.target.id: [each.id for each in node.iter.elts if isinstance(each, ast.Name)]
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and dotted(node) == "app.command"]
    given = [each.id for call in calls for each in call.args if isinstance(each, ast.Name)]
    return {name: name in imported for each in given for name in loops.get(each, [each])}


# The register.


def problems_of(root: Path) -> list[str]:
    """Everything that is wrong with docs/claims.toml of a checkout."""
    register = tomllib.loads((root / "docs" / "claims.toml").read_text(encoding="utf-8"))
    claims = register.get("claim", [])
    found = [f"{name} has no claim" for name in unclaimed_pages(root, register, claims)]
    found += [f"exported name {name} has no claim" for name in unclaimed_names(root, claims)]
    ids = [claim.get("id") for claim in claims]
    found += [f"{name}: the id is used twice" for name in sorted({str(name) for name in ids if ids.count(name) > 1})]
    return found + [f"{claim.get('id')}: {problem}" for claim in claims for problem in claim_problems(root, claim)]


def unclaimed_pages(root: Path, register: dict[str, Any], claims: list[dict[str, Any]]) -> list[str]:
    """Pages that make no claim and are not listed as such."""
    pages = {"README.md", *(f"docs/{path.name}" for path in (root / "docs").glob("*.md"))}
    return sorted(pages - {claim.get("where") for claim in claims} - set(register.get("pages_without_claims", [])))


def unclaimed_names(root: Path, claims: list[dict[str, Any]]) -> list[str]:
    """Names of the façade that no claim's text or entry point has."""
    facade = definition(parsed(root / "__init__.py"), "__all__")
    names = ast.literal_eval(facade.value) if isinstance(facade, ast.Assign) else []
    said = " ".join(f"{claim.get('text')} {claim.get('entry')}" for claim in claims)
    return [name for name in names if name != "__version__" and not re.search(rf"\b{name}\b", said)]


def claim_problems(root: Path, claim: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with one claim."""
    if claim.keys() != KEYS or not all(claim.values()):
        yield f"keys must be {', '.join(sorted(KEYS))}, none of them empty; given are {', '.join(sorted(claim))}"
        return
    if claim["reach"] not in REACHES:
        yield f"reach must be one of {', '.join(sorted(REACHES))}, not {claim['reach']}"
    path = root / claim["where"]
    if len(claim["quote"]) < LEAST_QUOTE or not path.is_file():
        yield f"{claim['where']} is no file, or the quote has fewer than {LEAST_QUOTE} characters"
    elif claim["quote"] not in path.read_text(encoding="utf-8"):
        yield f"{claim['where']} no longer says {claim['quote']!r}"
    if problem := entry_problem(root, claim["entry"]):
        yield problem
    yield from test_problems(root, claim)


def test_problems(root: Path, claim: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the tests of a claim, and whether none of them names its entry point."""
    tests = {node: find_test(root, node) for node in claim["tests"]}
    for node, test in tests.items():
        if test is None:
            yield f"there is no test {node}"
        elif test.is_skipped:
            yield f"{node} is skipped everywhere, or may fail"
        elif not test.does_assert:
            yield f"{node} asserts nothing"
    there = [test for test in tests.values() if test is not None]
    if claim["reach"] == "default" and there and all(test.is_gpu for test in there):
        yield "only tests on a GPU are listed, and a default run reaches it"
    name = re.split(r"[:. ]+", claim["entry"].partition(" --")[0])[-1]
    texts = [(root / node.partition("::")[0]).read_text(encoding="utf-8") for node, test in tests.items() if test]
    if texts and not any(re.search(rf"\b{name}\b", text) for text in texts):
        yield f"no listed test's file names the entry point {name}"


def main(arguments: list[str]) -> int:
    """Prints what is wrong; returns 1 where something is."""
    root = Path(arguments[0]) if arguments else Path(__file__).parents[2]
    problems = problems_of(root)
    print("\n".join([*problems, f"{len(problems)} problems in the register of claims"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
