"""Child processes that run a small script and write a log, for what can only be seen from outside a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from environment import child_variables

__all__ = ["Child", "parse_line", "read_entries", "run_script"]


@dataclass(frozen=True, slots=True)
class Child:
    """What a script left: its exit code, its output, and the entries of its log in the order of the file."""

    rc: int
    stdout: str
    stderr: str
    entries: list[dict[str, Any]]

    def named(self, event: str) -> list[dict[str, Any]]:
        """The entries of one name."""
        return [entry for entry in self.entries if entry["event"] == event]


def run_script(
    folder: Path,
    source: str,
    *arguments: str,
    changes: Mapping[str, str] | None = None,
    timeout_s: float = 60,
    python: str = sys.executable,
) -> Child:
    """Runs a script in a child process and reads its log.

    Args:
        folder: An empty folder; the script and its log `log.jsonl` lie in it, and it is the working directory.
        source: The script. `sys.argv[1]` is the path of the log, `arguments` follow.
        changes: Variables on top of `child_variables`; an empty value deletes.
        timeout_s: Seconds after which the child is killed and the test fails.
        python: The interpreter.
    """
    script, log = folder / "script.py", folder / "log.jsonl"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [python, str(script), str(log), *arguments],
        env=child_variables({"PYTHONIOENCODING": "utf-8"} | dict(changes or {})),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )
    return Child(done.returncode, done.stdout, done.stderr, read_entries(log) if log.is_file() else [])


def read_entries(log: Path) -> list[dict[str, Any]]:
    """Reads a log strictly: a torn or empty line, or one that is no JSON object, fails the test."""
    text = log.read_text(encoding="utf-8")
    assert text.endswith("\n") or not text, f"{log} ends in a torn line"
    return [parse_line(line) for line in text.splitlines()]


def parse_line(line: str) -> dict[str, Any]:
    """Parses one line as strict JSON, without NaN and infinities."""
    entry = json.loads(line, parse_constant=_refuse)
    assert isinstance(entry, dict), f"not an object: {line}"
    return entry


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
