"""The statistics record: cumulative counters that any two records subtract, and the invariants that they keep."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from ..memory.outcome import Outcome
from .clock import STEP_KINDS, StepKind, StepRecord

__all__ = ["Counters", "Statistics", "StepsByKind"]

# A gauge: the copies that are under way now. Every other field only grows.
_GAUGE = "prefetch_pending"


class StepsByKind(Mapping[str, int]):
    """Steps per kind: an immutable mapping of the four kinds, zeros present.

    Args:
        counts: Steps by kind; a kind that is left out is 0.

    Raises:
        ValueError: A key is not one of the four kinds.
    """

    __slots__ = ("_counts",)
    _counts: tuple[int, ...]

    def __init__(self, counts: Mapping[str, int] | Mapping[StepKind, int] | None = None) -> None:
        given: dict[str, int] = {str(kind): count for kind, count in (counts or {}).items()}
        unknown = sorted(set(given) - set(STEP_KINDS))
        if unknown:
            raise ValueError(f"steps_by_kind has unknown kinds {unknown}; the kinds are {', '.join(STEP_KINDS)}.")
        self._counts = tuple(given.get(kind, 0) for kind in STEP_KINDS)

    def __getitem__(self, kind: str) -> int:
        for name, count in zip(STEP_KINDS, self._counts, strict=True):
            if name == kind:
                return count
        raise KeyError(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(STEP_KINDS)

    def __len__(self) -> int:
        return len(STEP_KINDS)

    def __hash__(self) -> int:
        return hash(self._counts)

    def __repr__(self) -> str:
        return f"StepsByKind({dict(self)})"


@dataclass(frozen=True, slots=True)
class Statistics:
    """One statistics record; docs/statistics.md says what each field counts.

    Fields are cumulative since the store was built, save `prefetch_pending`, a gauge; they are rendered in this order.
    """

    steps: int = 0
    steps_failed: int = 0
    steps_by_kind: StepsByKind = field(default_factory=StepsByKind)
    tokens_prefill: int = 0
    tokens_decode: int = 0
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    lookups: int = 0
    hits: int = 0
    joins: int = 0
    misses: int = 0
    fills: int = 0
    fills_failed: int = 0
    exhausted: int = 0
    waves: int = 0
    evictions: int = 0
    bytes: int = 0
    bytes_in_place: int = 0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_pending: int = 0
    bytes_prefetch: int = 0
    reads: int = 0
    bytes_disk: int = 0
    advised: int = 0
    forced: int = 0
    step_ns: int = 0
    stall_ns: int = 0
    copy_ns: int = 0
    host_ns: int = 0

    @classmethod
    def zero(cls) -> Statistics:
        """The record of a store that has done nothing."""
        return cls()

    @classmethod
    def of_step(cls, record: StepRecord) -> Statistics:
        """What one ended step adds."""
        return cls(
            steps=1,
            steps_failed=int(record.failed),
            steps_by_kind=StepsByKind({record.kind: 1}),
            tokens_prefill=record.tokens_prefill,
            tokens_decode=record.tokens_decode,
            tokens_drafted=record.tokens_drafted,
            tokens_accepted=record.tokens_accepted,
            step_ns=record.step_ns,
            host_ns=record.host_ns,
            **_outcome_fields(record.outcome),
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Statistics:
        """Reads a rendered record; a field that this version does not know is ignored.

        Raises:
            ValueError: A field is missing or is not an integer; the message names every one.
        """
        kinds = values.get("steps_by_kind")
        flat = {f"steps_by_kind.{kind}": kinds.get(kind) for kind in STEP_KINDS} if isinstance(kinds, Mapping) else {}
        flat = flat or {"steps_by_kind": None}
        flat |= {name: values.get(name) for name in _COUNTS}
        counts = {name: value for name, value in flat.items() if type(value) is int}
        if len(counts) < len(flat):
            raise ValueError(f"Not a statistics record: no integer in {', '.join(sorted(set(flat) - set(counts)))}.")
        by_kind: dict[str, int] = {kind: counts.pop(f"steps_by_kind.{kind}") for kind in STEP_KINDS}
        return cls(steps_by_kind=StepsByKind(by_kind), **counts)

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """The record as it is rendered: fields in order, kinds as a plain dict."""
        return {name: dict(self.steps_by_kind) if name == "steps_by_kind" else getattr(self, name) for name in _NAMES}

    def __add__(self, other: Statistics) -> Statistics:
        return self._merged(other, operator.add)

    def __sub__(self, other: Statistics) -> Statistics:
        return self._merged(other, operator.sub)

    def _merged(self, other: Statistics, combine: Callable[[int, int], int]) -> Statistics:
        if not isinstance(other, Statistics):
            return NotImplemented
        kinds: dict[str, int] = {
            kind: combine(self.steps_by_kind[kind], other.steps_by_kind[kind]) for kind in STEP_KINDS
        }
        counts = {name: combine(getattr(self, name), getattr(other, name)) for name in _COUNTS}
        return Statistics(steps_by_kind=StepsByKind(kinds), **counts)

    def violations(self) -> list[str]:
        """Names every invariant that this record breaks, with the figures; empty when it reconciles."""
        found = [f"{name} is negative: {value}" for name, value in self._flat().items() if value < 0]
        for whole, parts in _SUMS.items():
            found += self._unequal(whole, parts)
        if self.steps != sum(self.steps_by_kind.values()):
            found.append(f"steps {self.steps} is not the sum of steps_by_kind {dict(self.steps_by_kind)}")
        for small, bounds in _BOUNDS.items():
            limit = sum(getattr(self, name) for name in bounds)
            if getattr(self, small) > limit:
                found.append(f"{small} {getattr(self, small)} exceeds {self._figures(bounds)} = {limit}")
        if (self.bytes == 0) != (self.fills == 0):
            found.append(f"bytes {self.bytes} cannot be the record bytes of fills {self.fills}")
        return found

    def violations_since(self, earlier: Statistics) -> list[str]:
        """Names every counter that is smaller than in an earlier record of the same store; the gauge is exempt."""
        before = earlier._flat()
        return [
            f"{name} fell from {before[name]} to {value}"
            for name, value in self._flat().items()
            if value < before[name] and name != _GAUGE
        ]

    def _unequal(self, whole: str, parts: tuple[str, ...]) -> list[str]:
        value, total = getattr(self, whole), sum(getattr(self, name) for name in parts)
        return [] if value == total else [f"{whole} {value} is not {self._figures(parts)} = {total}"]

    def _figures(self, names: tuple[str, ...]) -> str:
        return " + ".join(f"{name} {getattr(self, name)}" for name in names)

    def _flat(self) -> dict[str, int]:
        kinds = {f"steps_by_kind.{kind}": count for kind, count in self.steps_by_kind.items()}
        return {name: getattr(self, name) for name in _COUNTS} | kinds


class Counters:
    """Accumulates one store's statistics; a snapshot is consistent because a step is added in one go, when it ends."""

    __slots__ = ("_lock", "_total")

    def __init__(self) -> None:
        # Re-entrant: a signal handler may take a snapshot in the thread that is committing.
        self._lock = threading.RLock()
        self._total = Statistics.zero()

    def commit(self, record: StepRecord) -> None:
        """Adds one ended step; to be called once per step."""
        self._grow(Statistics.of_step(record))

    def add(self, outcome: Outcome) -> None:
        """Adds work that belongs to no step, such as a prefetch that was resolved between two."""
        self._grow(Statistics(steps_by_kind=StepsByKind(), **_outcome_fields(outcome)))

    def snapshot(self) -> Statistics:
        """The totals now, as a frozen value."""
        return self._total

    def _grow(self, more: Statistics) -> None:
        with self._lock:
            self._total = self._total + more

    def __repr__(self) -> str:
        total = self._total
        return f"<Counters {total.steps} steps: {total.lookups} lookups, {total.misses} misses>"


_NAMES = tuple(each.name for each in fields(Statistics))
_COUNTS = tuple(name for name in _NAMES if name != "steps_by_kind")
_OUTCOME_NAMES = tuple(each.name for each in fields(Outcome))
_SUMS = {
    "lookups": ("hits", "joins", "misses", "forced"),
    "misses": ("fills", "fills_failed", "exhausted"),
    "prefetch_issued": ("prefetch_used", "prefetch_late", "prefetch_wasted", "prefetch_pending"),
}
_BOUNDS = {"steps_failed": ("steps",), "evictions": ("fills", "prefetch_issued"), "stall_ns": ("step_ns",)}


def _outcome_fields(outcome: Outcome) -> dict[str, int]:
    return {name: getattr(outcome, name) for name in _OUTCOME_NAMES}
