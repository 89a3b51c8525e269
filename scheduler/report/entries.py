"""Takes the entries of all logs: the envelope, the sequence, and what every entry adds to its run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from ...steps.sink import SCHEMA, Level
from .counts import describe, is_count
from .events import Events
from .findings import Findings, Place
from .numbers import Numbers
from .runs import Run, Told

__all__ = ["Entries"]

_MAX_TEXT = 200
_LEVELS = get_args(Level)
_SEVERE = ("warning", "error", "critical")
_TEXTS = ("event", "ts", "run_id")
_NUMBERS = {"mono_ns": 0, "seq": 1, "pid": 0}

Entry = Mapping[str, Any]


class Entries:
    """Takes entries in any order and keeps aggregates by run.

    Args:
        findings: Gets every violation that shows in an entry; `ending.finish` finds the others.
    """

    def __init__(self, findings: Findings) -> None:
        self.runs: dict[str, Run] = {}
        self._findings = findings
        self._events = Events(findings)

    def take(self, entry: Entry, file: int, place: Place) -> bool:
        """Takes one JSON object of a log.

        Args:
            entry: The object.
            file: The number of the log: one process writes a number once into each.
            place: Where it stands.

        Returns:
            Whether it is an entry of this library; those of others are let alone.
        """
        schema = entry.get("schema")
        is_ours = isinstance(schema, str) and schema.partition("/")[0] == SCHEMA.partition("/")[0]
        if not is_ours and not ("run_id" in entry and "seq" in entry):
            return False
        run_id = entry.get("run_id")
        name = run_id[:_MAX_TEXT] if isinstance(run_id, str) else ""
        is_whole = self._check_envelope(entry, name, place)
        if not name or not is_count(entry.get("seq"), 1):
            return True
        run = self.runs.get(name) or self.runs.setdefault(name, Run(name, place))
        told = Told(entry["seq"], place)
        if self._is_first_in_log(run, file, told):
            is_new = _add_number(run, told)
            if is_new and is_whole:
                _count(run, entry)
            if schema == SCHEMA:
                self._events.take(run, entry, told, is_repeated=not is_new)
        return True

    def _check_envelope(self, entry: Entry, run_id: str, place: Place) -> bool:
        wrong = [*_wrong_envelope(entry)]
        for text in wrong:
            self._findings.add(place, run_id, "type", text)
        schema = entry.get("schema")
        if schema != SCHEMA:
            self._findings.add(place, run_id, "schema", f"schema is {describe(schema)}, not {SCHEMA}")
        return not wrong

    def _is_first_in_log(self, run: Run, file: int, told: Told) -> bool:
        if run.file != file:
            run.file, run.file_numbers = file, Numbers()
        if run.file_numbers.add(told.number):
            return True
        text = f"seq {told.number} of the run stands in this log before"
        self._findings.add(told.place, run.run_id, "sequence.duplicate", text)
        return False


def _add_number(run: Run, told: Told) -> bool:
    if told.number > run.numbers.last + 1:
        run.add_jump(run.numbers.last + 1, told.number - 1, told.place)
    is_new = run.numbers.add(told.number)
    run.num_repeated += not is_new
    if run.last is None or told.number > run.last.number:
        run.last = told
    return is_new


def _count(run: Run, entry: Entry) -> None:
    run.num_entries += 1
    run.pid = entry["pid"]
    ts, now_ns = entry["ts"][:_MAX_TEXT], entry["mono_ns"]
    run.first_ts = min(run.first_ts or ts, ts)
    run.last_ts = max(run.last_ts, ts)
    run.first_ns = now_ns if run.first_ns is None else min(run.first_ns, now_ns)
    run.last_ns = now_ns if run.last_ns is None else max(run.last_ns, now_ns)
    if is_count(entry.get("dropped")):
        run.num_dropped += entry["dropped"]
    if entry["level"] in _SEVERE:
        code = entry.get("code")
        run.count_warning(code if isinstance(code, str) else entry["event"])


def _wrong_envelope(entry: Entry) -> Iterator[str]:
    for name in _TEXTS:
        value = entry.get(name)
        if not (isinstance(value, str) and value):
            yield f"{name} is {describe(value)}, not a text"
    for name, least in _NUMBERS.items():
        value = entry.get(name)
        if not is_count(value, least):
            yield f"{name} is {describe(value)}, not an integer of at least {least}"
    if entry.get("level") not in _LEVELS:
        yield f"level is {describe(entry.get('level'))}, not one of {', '.join(_LEVELS)}"
