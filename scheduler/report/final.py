"""Reads a `process.final` entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import counts as figures
from .counts import Counts, describe, is_count
from .runs import Final, Told

__all__ = ["read_final"]

_MAX_TEXT = 200

Record = Callable[[object, str], Counts | None]
Say = Callable[[str, str], None]


def read_final(entry: Mapping[str, Any], told: Told, *, record: Record, say: Say) -> Final:
    """Returns what an entry says, without what is of a wrong type.

    Args:
        entry: The entry.
        told: Its number and place.
        record: Reads and checks one statistics record, of which the second argument names the place in the entry.
        say: Told the rule and the text of every violation.
    """
    totals = record(entry.get("totals"), "totals")
    listed = entry.get("stores")
    if not isinstance(listed, list):
        say("type", f"stores is {describe(listed)}, not a list")
    known: dict[int, Counts] = {}
    serials: set[int] = set()
    parts: list[Counts | None] = [] if isinstance(listed, list) else [None]
    num_folded = 0
    for index, item in enumerate(listed if isinstance(listed, list) else ()):
        store = item if isinstance(item, dict) else {}
        part = record(store.get("statistics"), f"stores[{index}].statistics")
        parts.append(part)
        serial = store.get("store")
        if serial == "folded" and is_count(store.get("folded"), 1):
            num_folded += store["folded"]
        elif not is_count(serial, 1):
            say("type", f"stores[{index}].store is {describe(serial)}, not a serial")
        elif serial in serials:
            say("store.serial", f"stores lists store {serial} twice")
        else:
            serials.add(serial)
            if part is not None:
                known[serial] = part
    whole = None if None in parts else figures.total(part for part in parts if part is not None)
    reason, flushed_by = (_text(entry, name, say) for name in ("reason", "flushed_by"))
    return Final(*told, totals, whole, known, frozenset(serials), num_folded, reason, flushed_by)


def _text(entry: Mapping[str, Any], name: str, say: Say) -> str | None:
    value = entry.get(name)
    if value is None and name in entry:
        return None
    if isinstance(value, str) and value:
        return value[:_MAX_TEXT]
    say("type", f"{name} is {describe(value) if name in entry else 'missing'}, neither null nor a text")
    return None
