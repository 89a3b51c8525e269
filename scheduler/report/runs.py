"""What is kept of a run and of its stores while their logs are read: aggregates, never entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .counts import Counts
from .facts import NO_FACTS, Facts
from .findings import Place
from .numbers import Numbers

__all__ = ["Final", "Run", "Sample", "Store", "Told"]

# A log of the library has a handful of codes; text without end is not kept.
_MAX_CODES = 64
_MAX_TEXT = 200
_MAX_JUMPS = 4096


class Told(NamedTuple):
    """That something was said: the number of the entry, and its place."""

    number: int
    place: Place


class Sample(NamedTuple):
    """One statistics record of a store: the entry it stands in, and its figures."""

    number: int
    place: Place
    event: str
    counts: Counts


class Final(NamedTuple):
    """A `process.final`: its totals, its stores by serial, and how many closed ones are folded into one.

    `parts` is the sum over its stores, the folded ones too. Figures that are no record are None, and left out of
    `stores`.
    """

    number: int
    place: Place
    totals: Counts | None
    parts: Counts | None
    stores: Mapping[int, Counts]
    serials: frozenset[int]
    num_folded: int
    reason: str | None
    flushed_by: str | None


@dataclass(slots=True)
class Store:
    """A store of a run.

    Attributes:
        built: Where `store.built` stands; `facts` is what it said.
        first: The earliest other entry that names the store.
        latest: The record with the largest number.
        previous: The record that was read last; another one than `latest` only where entries are out of order.
        closed: The record of `store.closed`.
    """

    serial: int
    built: Told | None = None
    facts: Facts = NO_FACTS
    first: Told | None = None
    latest: Sample | None = None
    previous: Sample | None = None
    closed: Sample | None = None


@dataclass(slots=True)
class Run:
    """One process, by its `run_id`.

    Attributes:
        numbers: Of its entries, over all logs; `file_numbers` are those in the log that is being read.
        jumps: Ranges of numbers that were left out when a larger one came, with the place of that one.
        last: The entry with the largest number.
        warnings: Entries of level warning or above, by code.
        num_repeated: Entries that stand in a second log too.
    """

    run_id: str
    first_place: Place
    pid: int | None = None
    numbers: Numbers = field(default_factory=Numbers)
    file_numbers: Numbers = field(default_factory=Numbers)
    file: int = -1
    jumps: list[tuple[int, int, Place]] = field(default_factory=list)
    last: Told | None = None
    num_entries: int = 0
    num_repeated: int = 0
    num_dropped: int = 0
    first_ts: str = ""
    last_ts: str = ""
    first_ns: int | None = None
    last_ns: int | None = None
    requested: Told | None = None
    final: Final | None = None
    stores: dict[int, Store] = field(default_factory=dict)
    warnings: Counter[str] = field(default_factory=Counter)

    def store(self, serial: int) -> Store:
        """Returns a store, made when it is first named."""
        return self.stores.setdefault(serial, Store(serial))

    def count_warning(self, code: str) -> None:
        """Counts one warning; beyond 64 codes they are "others"."""
        code = code[:_MAX_TEXT]
        if code not in self.warnings and len(self.warnings) >= _MAX_CODES:
            code = "others"
        self.warnings[code] += 1

    def add_jump(self, first: int, last: int, place: Place) -> None:
        """Remembers where numbers were left out; another log may still hold them."""
        if len(self.jumps) >= _MAX_JUMPS:
            self.jumps = [jump for jump in self.jumps if any(n not in self.numbers for n in (jump[0], jump[1]))]
        if len(self.jumps) < _MAX_JUMPS:
            self.jumps.append((first, last, place))

    def place_of_missing(self, number: int) -> Place:
        """Returns the entry that came where a missing number should have, else the first entry of the run."""
        return next((place for first, last, place in self.jumps if first <= number <= last), self.first_place)
