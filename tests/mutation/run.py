"""Breaks the product one line at a time and demands that the one test named for each break fails.

    python tests/mutation/run.py [ids …] [--jobs N] [--limit-s S]

README.md, beside this file, says what counts as killed and how to add a mutant.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

# Errors of a mutant that does not run, however well it imports: whatever test reaches it fails, and proves nothing.
_NOT_RUNNING = (NameError, ImportError, SyntaxError)
_SHIPPED = (".py", ".cu", ".typed")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One break: `old` → `new` in `file`, the promise that it breaks, and the test that must notice."""

    id: str
    file: str
    old: str
    new: str
    breaks: str
    test: str


@dataclass(frozen=True, slots=True)
class Project:
    """A checkout: its root, the name of its package, and the package's files relative to the root."""

    root: Path
    package: str
    files: tuple[str, ...]

    @classmethod
    def of(cls, root: Path) -> Project:
        """Reads it from `pyproject.toml`: the root is the package, its folders are the sub-packages."""
        table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        packages: list[str] = table["tool"]["setuptools"]["packages"]
        folders = [root.joinpath(*name.split(".")[1:]) for name in packages]
        found = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in _SHIPPED)
        return cls(root, packages[0], tuple(path.relative_to(root).as_posix() for path in found))

    def copy(self, folder: Path, mutant: Mutant | None) -> None:
        """Writes the package into `folder`, mutated if there is a mutant.

        Raises:
            ValueError: The mutant's old text is not in its file exactly once.
        """
        for name in self.files:
            target = folder / self.package / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.root / name, target)
        if mutant is None:
            return
        if mutant.file not in self.files:
            raise ValueError(f"{mutant.file} is no file of the package")
        target = folder / self.package / mutant.file
        text = target.read_text(encoding="utf-8")
        if (count := text.count(mutant.old)) != 1:
            raise ValueError(f"the old text is in {mutant.file} {count} times, not once")
        if mutant.old == mutant.new:
            raise ValueError("the new text is the old one")
        target.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")

    def module(self, file: str) -> str:
        """The module name of a file of the package."""
        parts = file.removesuffix(".py").split("/")
        return ".".join([self.package, *(part for part in parts if part != "__init__")])


@dataclass(slots=True)
class Trial:
    """One run of one test against one copy, in a process of its own."""

    mutant: Mutant | None
    test: str
    folder: Path
    process: BaseProcess
    started_s: float

    def result(self) -> dict[str, Any]:
        """What the process left; of one that died or was killed, only that."""
        file = self.folder / "result.json"
        if file.is_file():
            result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return result
        return {"died": f"the process ended with code {self.process.exitcode} and no result"}


class _Counts:
    """A pytest plugin that counts what was really run."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.not_running = ""

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.excinfo is not None and issubclass(call.excinfo.type, _NOT_RUNNING):
            self.not_running = call.excinfo.exconly()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[f"{report.when} {report.outcome}"] += 1


def _run_test(project: Project, folder: Path, module: str, test: str) -> None:
    """Runs one test against the copy in `folder`. Called in a process that has not imported the package."""
    if hasattr(os, "setsid"):
        os.setsid()  # what it starts ends with it when the time is up
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    os.environ.pop("EXPECT_INSTALLED", None)
    empty = folder / "empty"
    empty.mkdir()
    os.chdir(empty)  # the checkout's root has folders that are named like packages of others
    result = _imported(project.package, module, folder) or _tested(project, folder, test)
    (folder / "result.part").write_text(json.dumps(result), encoding="utf-8")
    os.replace(folder / "result.part", folder / "result.json")


def _imported(package: str, module: str, folder: Path) -> dict[str, Any] | None:
    if package in sys.modules:
        return {"died": f"{package} was imported before the copy was made"}
    try:
        importlib.import_module(module)
    except BaseException as error:  # whatever it is, the mutant does not import
        return {"died": f"does not import: {type(error).__name__}: {error}"}
    origin = str(sys.modules[module].__file__)
    return None if Path(origin).is_relative_to(folder) else {"died": f"{origin} was imported and not the copy"}


def _tested(project: Project, folder: Path, test: str) -> dict[str, Any]:
    counts, root = _Counts(), project.root
    options = ["-q", "-x", "--rootdir", str(root), "-c", str(root / "pyproject.toml"), "-p", "no:cacheprovider"]
    # The parent has imported pytest's plugins, so that they cannot be rewritten: no assertion of ours is in them.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--basetemp", str(folder / "temporary")]
    code = int(pytest.main([*options, f"{root}/{test}"], plugins=[counts]))
    return {"code": code, "outcomes": dict(counts.outcomes), "not_running": counts.not_running}


def judge(result: Mapping[str, Any]) -> str:
    """Says what one run of a test shows: "passed", "failed", or why it shows nothing."""
    if "died" in result:
        return str(result["died"])
    outcomes = Counter(result["outcomes"])
    num_called = outcomes["call passed"] + outcomes["call failed"]
    if result["not_running"]:
        return f"does not run: {result['not_running']}"
    if result["code"] not in (0, 1) or not num_called:
        return f"runs no test: pytest ended with code {result['code']} after {dict(outcomes)}"
    if result["code"] == 0:
        return "passed"
    return "failed" if outcomes["call failed"] else f"fails outside the test: {dict(outcomes)}"


class Runner:
    """Runs trials, a few at a time, each within a limit of time."""

    def __init__(self, project: Project, scratch: Path, num_jobs: int, limit_s: float) -> None:
        self._project, self._scratch, self._num_jobs, self._limit_s = project, scratch, num_jobs, limit_s
        methods = multiprocessing.get_all_start_methods()
        # A fork has everything that was imported before; where there is none, each trial imports it again.
        self._context: Any = multiprocessing.get_context(next(name for name in ("fork", "spawn") if name in methods))
        self._num_started = 0

    def run(self, wanted: Iterable[tuple[Mutant | None, str]]) -> Iterator[tuple[Mutant | None, str, str, float]]:
        """Yields (mutant, test, what it shows, seconds) as trials end."""
        queue, running = deque(wanted), list[Trial]()
        while queue or running:
            while queue and len(running) < self._num_jobs:
                mutant, test = queue.popleft()
                try:
                    running.append(self._start(mutant, test))
                except ValueError as error:
                    yield mutant, test, str(error), 0.0
            wait([trial.process.sentinel for trial in running], timeout=0.2)
            now_s = time.monotonic()
            for trial in list(running):
                if trial.process.is_alive() and now_s - trial.started_s < self._limit_s:
                    continue
                running.remove(trial)
                shown = f"not done in {self._limit_s:g} s" if trial.process.is_alive() else judge(trial.result())
                _end(trial.process)
                if shown not in ("passed", "failed"):
                    shown += _last_lines(trial.folder / "output.txt")
                shutil.rmtree(trial.folder, ignore_errors=True)
                yield trial.mutant, trial.test, shown, now_s - trial.started_s

    def _start(self, mutant: Mutant | None, test: str) -> Trial:
        self._num_started += 1
        folder = self._scratch / str(self._num_started)
        folder.mkdir()
        self._project.copy(folder, mutant)
        module = self._project.module("__init__.py" if mutant is None else mutant.file)
        process = self._context.Process(target=_run_test, args=(self._project, folder, module, test))
        process.start()
        return Trial(mutant, test, folder, process, time.monotonic())


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        if hasattr(os, "killpg") and process.pid:
            with suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        process.kill()
    process.join()


def _last_lines(output: Path) -> str:
    text = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
    return "".join(f"\n    | {line}" for line in text.splitlines()[-8:])


def _main(arguments: Sequence[str] | None = None) -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("ids", nargs="*", help="mutants to try; all of them if none is named")
    parser.add_argument("--root", type=Path, default=here.parents[1], help="checkout (default: this one)")
    parser.add_argument("--mutants", type=Path, default=here / "mutants.toml")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds a mutant may take")
    chosen = parser.parse_args(arguments)
    table = tomllib.loads(chosen.mutants.read_text(encoding="utf-8"))
    mutants = [Mutant(**entry) for entry in table["mutant"]]
    twice = [name for name, count in Counter(mutant.id for mutant in mutants).items() if count > 1]
    unknown = set(chosen.ids) - {mutant.id for mutant in mutants}
    if twice or unknown:
        parser.error(f"ids that are there twice: {twice}; ids that are not there: {sorted(unknown)}")
    mutants = [mutant for mutant in mutants if not chosen.ids or mutant.id in chosen.ids]
    _preload(table.get("preload", []))
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(Project.of(chosen.root.resolve()), Path(scratch).resolve(), chosen.jobs, chosen.limit_s)
        failed = _try_all(runner, mutants, lambda line: print(line, flush=True))
    for line in failed:
        print(line)
    print(f"{len(mutants) - len(failed)} passed, {len(failed)} failed")
    return int(bool(failed))


def _try_all(runner: Runner, mutants: Sequence[Mutant], say: Callable[[str], None]) -> list[str]:
    """Returns a line for every mutant that was not killed."""
    sound: dict[str, str] = {}
    tests = dict.fromkeys(mutant.test for mutant in mutants)
    for _, test, shown, seconds in runner.run((None, test) for test in tests):
        sound[test] = shown
        say(f"{'unmutated' if shown == 'passed' else 'UNSOUND':10} {test} {seconds:.1f} s")
    failed = [
        f"invalid: {mutant.id}: {mutant.test} on the unmutated copy: {sound[mutant.test]}"
        for mutant in mutants
        if sound[mutant.test] != "passed"
    ]
    ready = [(mutant, mutant.test) for mutant in mutants if sound[mutant.test] == "passed"]
    for tried, test, shown, seconds in runner.run(ready):
        assert tried is not None
        if shown != "failed":
            failed.append(f"survived: {tried.id}: {test}" if shown == "passed" else f"invalid: {tried.id}: {shown}")
        say(f"{'killed' if shown == 'failed' else 'NOT KILLED':10} {tried.id} {seconds:.1f} s")
    return failed


def _preload(names: Iterable[str]) -> None:
    # One thread each: mutants run side by side, and a pool of threads that was started here would not survive a fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"not preloaded: {name}")
    gc.freeze()


if __name__ == "__main__":
    sys.exit(_main())
