"""What a look-up, a copy or a read did: one frozen value that upper floors add up."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Outcome", "Tally"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts and nanoseconds of residency work; names and meanings are those of a statistics record.

    Values add field by field, so a step's outcome is the sum over its layers.
    `prefetch_pending` may be negative in a single outcome (a pending copy was resolved); its running sum never is.
    """

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
    stall_ns: int = 0
    copy_ns: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(*(getattr(self, name) + getattr(other, name) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(Outcome))


class Tally:
    """A running sum of outcomes, cheap to add a few fields to. For one thread."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(_NAMES, 0)

    def add(self, **counts: int) -> None:
        """Add to fields of an `Outcome`, by name."""
        for name, count in counts.items():
            self._counts[name] += count

    def take(self) -> Outcome:
        """Return the sum and start over."""
        outcome = Outcome(**self._counts)
        self._counts = dict.fromkeys(_NAMES, 0)
        return outcome
