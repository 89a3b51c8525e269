"""One statistics record of a log: its types, its invariants, and how it compares with another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from operator import itemgetter, le
from typing import TypeGuard

from ...steps.clock import STEP_KINDS
from ...steps.statistics import Statistics

__all__ = [
    "Counts",
    "as_mapping",
    "describe",
    "differences",
    "falls",
    "invariants",
    "is_count",
    "read",
    "total",
    "wrong_bytes",
]

_GAUGE = "prefetch_pending"
_FLAT = tuple(each.name for each in fields(Statistics) if each.name not in ("steps_by_kind", _GAUGE))
_KINDS = tuple(f"steps_by_kind.{kind}" for kind in STEP_KINDS)

# The order of a `Counts`: the counters, the steps by kind, and last the gauge.
COUNTERS = (*_FLAT, *_KINDS)
Counts = tuple[int, ...]
_FILLS, _BYTES = COUNTERS.index("fills"), COUNTERS.index("bytes")

_get_flat = itemgetter(*_FLAT, _GAUGE)
_get_kinds = itemgetter(*STEP_KINDS)
_ONLY_INTS = {int}
# No counter gets there; a number of 4000 digits is damage, and would break the arithmetic of rates and of text.
_LIMIT = 2**63


def read(record: object) -> Counts | list[str]:
    """Returns the figures of a record, or what is wrong with their types."""
    # Most records are sound: what they must be is asked at once, and only for the others field by field.
    try:
        *flat, gauge = _get_flat(record)  # type: ignore[arg-type]
        kinds = _get_kinds(record["steps_by_kind"])  # type: ignore[index]
        counts = (*flat, *kinds, gauge)
        if set(map(type, counts)) == _ONLY_INTS and max(counts) < _LIMIT and min(counts) > -_LIMIT:
            return counts
    except (KeyError, TypeError, IndexError):
        pass
    return list(_wrong_types(record))


def invariants(counts: Counts) -> list[str]:
    """Names every invariant of a single record that these figures break; `Statistics.violations` knows them."""
    if _is_sound(as_mapping(counts)):
        return []
    return _statistics(counts).violations()


def falls(earlier: Counts, later: Counts) -> list[str]:
    """Names every counter that is smaller in the later record; the gauge is exempt."""
    if all(map(le, earlier[:-1], later)):
        return []
    return [f"{name} fell from {a} to {b}" for name, a, b in zip(COUNTERS, earlier, later) if b < a]


def differences(left: Counts, right: Counts) -> list[str]:
    """Names every figure in which two records differ, the gauge too, as `name left, not right`."""
    names = (*COUNTERS, _GAUGE)
    return [f"{name} {a}, not {b}" for name, a, b in zip(names, left, right, strict=True) if a != b]


def total(records: Iterable[Counts]) -> Counts:
    """Returns the sums over records; zeros where there is none."""
    return tuple(map(sum, zip(*records, strict=True))) or (0,) * (len(COUNTERS) + 1)


def wrong_bytes(counts: Counts, smallest: int, largest: int) -> list[str]:
    """Says so where `bytes` cannot be the record bytes of `fills`, given the sizes of the store's expert records."""
    fills, moved = counts[_FILLS], counts[_BYTES]
    if fills * smallest <= moved <= fills * largest:
        return []
    sizes = str(smallest) if smallest == largest else f"{smallest} to {largest}"
    return [f"bytes {moved} cannot be those of fills {fills}: a record has {sizes} bytes"]


def as_mapping(counts: Counts) -> dict[str, int]:
    """Returns the figures by name; `steps_by_kind.paged` and so on stand for the kinds."""
    return dict(zip((*COUNTERS, _GAUGE), counts, strict=True))


def is_count(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether a value is an integer of 63 bits, not a boolean, of at least `least`."""
    return type(value) is int and least <= value < _LIMIT


def _is_sound(c: Mapping[str, int]) -> bool:
    # What `Statistics.violations` asks, without its messages: 50 times as many records a second. A test compares both.
    return (
        min(c.values()) >= 0
        and c["lookups"] == c["hits"] + c["joins"] + c["misses"] + c["forced"]
        and c["misses"] == c["fills"] + c["fills_failed"] + c["exhausted"]
        and c["prefetch_issued"]
        == c["prefetch_used"] + c["prefetch_late"] + c["prefetch_wasted"] + c["prefetch_pending"]
        and c["steps"] == sum(c[name] for name in _KINDS)
        and c["steps_failed"] <= c["steps"]
        and c["evictions"] <= c["fills"] + c["prefetch_issued"]
        and c["stall_ns"] <= c["step_ns"]
        and (c["bytes"] == 0) == (c["fills"] == 0)
    )


def _statistics(counts: Counts) -> Statistics:
    values: dict[str, object] = dict(as_mapping(counts))
    kinds = {kind: values[f"steps_by_kind.{kind}"] for kind in STEP_KINDS}
    return Statistics.from_dict(values | {"steps_by_kind": kinds})


def _wrong_types(record: object) -> Iterator[str]:
    if not isinstance(record, Mapping):
        yield f"{describe(record)}, not an object"
        return
    for name in (*_FLAT, _GAUGE):
        yield from _wrong_type(name, record)
    kinds = record.get("steps_by_kind")
    if not isinstance(kinds, Mapping):
        yield f"steps_by_kind is {describe(kinds)}, not an object"
        return
    for kind in STEP_KINDS:
        yield from (f"steps_by_kind.{text}" for text in _wrong_type(kind, kinds))


def _wrong_type(name: str, record: Mapping[str, object]) -> Iterator[str]:
    if name not in record:
        yield f"{name} is missing"
    elif type(value := record[name]) is not int or not -_LIMIT < value < _LIMIT:
        yield f"{name} is {describe(value)}, not an integer of 63 bits"


def describe(value: object) -> str:
    """Returns a value of a log in a few words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, (int, float)):
        return str(value) if isinstance(value, float) or abs(value) < _LIMIT else "a huge number"
    return "a list" if isinstance(value, list) else "an object"
