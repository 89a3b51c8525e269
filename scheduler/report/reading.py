"""Reads logs line by line: one line is in memory at a time, and what is kept grows with runs and stores only."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO

from .ending import finish
from .entries import Entries
from .findings import Findings, LogRead, Place
from .lines import Damage, Line, parse, read_lines
from .runs import Run

__all__ = ["STDIN", "Report", "read_logs"]

STDIN = "-"
# A log that begins with more lines of others than this is sorted as one without a time.
_PEEKED_LINES = 100
_MAX_CUT_TEXT = 4096
_NO_TIME = "\uffff"


@dataclass(frozen=True, slots=True)
class Report:
    """What a set of logs says.

    Attributes:
        logs: In the order in which they were read.
        runs: By `run_id`, in the order of their first entries.
        findings: What is wrong, damaged lines included.
    """

    logs: list[LogRead]
    runs: dict[str, Run]
    findings: Findings


def read_logs(names: Sequence[str], *, stdin: IO[bytes] | None = None) -> Report:
    """Reads JSON-lines logs, plain or compressed with gzip, that together are one set.

    Regular files are read in the order of the wall time of their first entries, so that rotated logs may be given in
    any order; others follow in the order given.

    Args:
        names: Paths; "-" is stdin. One that is given twice is read once.
        stdin: Read for "-"; None is that of the process.

    Raises:
        OSError: A log cannot be opened. Whatever is wrong inside is told by the report.
    """
    findings = Findings()
    entries = Entries(findings)
    logs = []
    times = {name: _first_time(name) for name in names}
    for number, name in enumerate(sorted(times, key=times.__getitem__)):
        log = LogRead(name)
        logs.append(log)
        with _opened(name, stdin) as file:
            for line in read_lines(file):
                _take(line, log, number, entries)
    for log in logs:
        for first, last, reason in log.damaged:
            lines = f"line {first}" if first == last else f"lines {first} to {last}"
            findings.add(Place(log.name, first), "", "damage", f"{lines}: {reason}")
    if not entries.runs:
        what = f"no entry of this library in {sum(log.num_lines for log in logs)} lines of {len(logs)} logs"
        findings.add(Place(logs[0].name if logs else STDIN, 0), "", "empty", what)
    for run in entries.runs.values():
        finish(run, logs, findings)
    return Report(logs, entries.runs, findings)


@contextmanager
def _opened(name: str, stdin: IO[bytes] | None) -> Iterator[IO[bytes]]:
    if name == STDIN:
        yield sys.stdin.buffer if stdin is None else stdin
        return
    with open(name, "rb") as file:
        yield file


def _first_time(name: str) -> str:
    """Returns the `ts` of the first entry; a pipe is not asked, as it can be read only once."""
    if name == STDIN or not stat.S_ISREG(os.stat(name).st_mode):
        return _NO_TIME
    with open(name, "rb") as file:
        for line in islice(read_lines(file), _PEEKED_LINES):
            entry = parse(line.content)
            if isinstance(entry, dict) and isinstance(entry.get("ts"), str):
                return str(entry["ts"])
    return _NO_TIME


def _take(line: Line, log: LogRead, number: int, entries: Entries) -> None:
    log.num_lines += 1
    entry = Damage(line.fault, False) if line.fault else parse(line.content)
    if isinstance(entry, dict):
        if entries.take(entry, number, Place(log.name, line.number)):
            log.num_entries += 1
        else:
            log.num_others += 1
    elif isinstance(entry, Damage):
        if entry.is_cuttable and not line.is_ended:
            log.cut = line.number, line.content[:_MAX_CUT_TEXT].decode("utf-8", "replace")
        else:
            log.add_damage(line.number, entry.reason)
