"""The environment of a test: variables changed in one portable way, and child processes that run Python."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

__all__ = ["change_variable", "changed_variables", "child_variables", "run_python"]

PREFIX = "EXPERTSTREAM_"


def change_variable(name: str, value: str) -> None:
    """Sets a variable of this process; an empty value deletes it, on every platform.

    Windows deletes a variable that is set to nothing and POSIX keeps it, so that a test that sets an empty
    one would test something else on each.

    Raises:
        OSError: The change was not made.
    """
    if value:
        os.environ[name] = value
    else:
        os.environ.pop(name, None)
    if os.environ.get(name, "") != value:
        raise OSError(f"cannot set the variable {name} to {value!r}")


@contextmanager
def changed_variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Changes variables of this process and puts back what was there."""
    before = {name: os.environ.get(name, "") for name in changes}
    try:
        for name, value in changes.items():
            change_variable(name, value)
        yield
    finally:
        for name, value in before.items():
            change_variable(name, value)


def child_variables(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns this process's variables without any EXPERTSTREAM_* one, with `changes`; an empty value deletes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    merged = kept | dict(changes or {})
    return {name: value for name, value in merged.items() if value}


def run_python(
    arguments: Sequence[str],
    changes: Mapping[str, str] | None = None,
    *,
    cwd: str | None = None,
    timeout_s: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter and returns its exit code, stdout and stderr.

    It runs in a folder of its own: in a checkout the folders of the package would shadow packages of the same
    names that others import, such as `kernels`.

    Args:
        arguments: Those of the interpreter, such as `["-c", code]`.
        changes: Variables on top of `child_variables`.
        cwd: Folder to run in; None is an empty one that is removed again.
        timeout_s: Seconds after which the child is killed and the test fails.
    """
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.run(
            [sys.executable, *arguments],
            env=child_variables({"PYTHONIOENCODING": "utf-8"} | dict(changes or {})),
            cwd=cwd or empty,
            capture_output=True,
            encoding="utf-8",
            timeout=timeout_s,
            check=False,
        )
