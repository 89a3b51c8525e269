"""The copies of one pass over a layer: read what the host lacks, evict, then copy; a failure loses nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..kernels.runtime import Event, Runtime
from .arena import HostArena
from .outcome import Tally
from .records import ExpertKey, RecordLayout
from .slots import Fill, SlotTable

if TYPE_CHECKING:
    from typing import Protocol

    class Level(Protocol):
        """What copies need of the store they serve."""

        @property
        def runtime(self) -> Runtime: ...
        @property
        def arena(self) -> HostArena: ...
        @property
        def tally(self) -> Tally: ...
        def keep_until_done(self, copies: Iterable[tuple[ExpertKey, Event]]) -> None: ...
        def settle(self, max_pending: int | None = None) -> None: ...


__all__ = ["Copies", "LayerSlots", "Lease"]


@dataclass(frozen=True, slots=True)
class Lease:
    """An expert that is readable in its slot until the serving moves on."""

    expert: int
    slot: int


@dataclass(slots=True)
class LayerSlots:
    """One layer's slots on the device.

    Attributes:
        table: Who lives in them.
        layout: Of a record.
        slots: uint8 [record bytes] each.
        parts: Part name → tensor [num_slots, …] over the same memory.
        last_read: Of each slot; None when nothing that reads it is outstanding.
        looked_up: Experts that this step has looked up already.
    """

    table: SlotTable
    layout: RecordLayout
    slots: tuple[torch.Tensor, ...]
    parts: dict[str, torch.Tensor]
    last_read: list[Event | None]
    looked_up: set[int]


class Copies:
    """Carries out the fills of one decision, in batches that the host arena can hold at once.

    A record is in host memory before its victim is evicted, so a read that fails evicts nobody (contract 2.7).
    """

    def __init__(self, store: Level, number: int, layer: LayerSlots, fills: Sequence[Fill]) -> None:
        self._store, self._number, self._layer = store, number, layer
        self._queue = list(fills)
        self._in_flight: list[tuple[Fill, Event]] = []
        self._filled: list[Lease] = []
        self._errors: list[BaseException] = []

    def start(self) -> None:
        """Start as many copies as host records can be held at once. Does not wait for copies, only for reads."""
        if not self._queue:
            return
        limit = self._store.arena.max_held(self._number)
        batch, self._queue = self._queue[:limit], self._queue[limit:]
        self._store.settle(limit - len(batch))  # records that are still copied from take places too
        outcome, errors = self._store.arena.require([ExpertKey(self._number, fill.expert) for fill in batch])
        self._store.tally.add(reads=outcome.reads, bytes_disk=outcome.bytes_disk, fills_failed=len(errors))
        self._errors += errors.values()
        for fill in batch:
            if ExpertKey(self._number, fill.expert) not in errors:
                self._start_one(fill)

    def finish(self) -> tuple[Lease, ...]:
        """Await every copy, starting those that are left; return the experts filled. Idempotent; raises no error."""
        while self._in_flight or self._queue:
            if self._in_flight:
                self._await_started()
            else:
                self.start()
        return tuple(self._filled)

    def raise_first(self) -> None:
        """Raise the first error of this pass, if any."""
        if self._errors:
            raise self._errors[0]

    def _start_one(self, fill: Fill) -> None:
        key = ExpertKey(self._number, fill.expert)
        self._layer.table.begin_fill(fill)
        self._store.tally.add(evictions=int(fill.victim is not None))
        try:
            slot, last_read = self._layer.slots[fill.slot], self._layer.last_read[fill.slot]
            event = self._store.runtime.copy(slot, self._store.arena.record(key), after=last_read)
        except Exception as exc:  # delivered by raise_first; the next copy into the slot awaits its last read
            self._fail(fill, exc)
            self._store.arena.release([key])
            return
        self._layer.last_read[fill.slot] = None
        self._in_flight.append((fill, event))

    def _await_started(self) -> None:
        arrived: list[tuple[ExpertKey, Event]] = []
        lost: list[tuple[ExpertKey, Event]] = []
        for fill, event in self._in_flight:
            copy = ExpertKey(self._number, fill.expert), event
            try:
                event.wait()
            except Exception as exc:  # delivered by raise_first, after the others were awaited
                self._fail(fill, exc)
                lost.append(copy)
                continue
            self._layer.table.end_fill(fill.expert)
            self._filled.append(Lease(fill.expert, fill.slot))
            arrived.append(copy)
        self._in_flight = []
        self._store.arena.release(key for key, _ in lost)
        num_bytes = len(arrived) * self._layer.layout.num_bytes
        stall_ns = sum(event.stall_ns for _, event in lost)
        self._store.tally.add(fills=len(arrived), bytes=num_bytes, stall_ns=stall_ns)
        # Computing waits for these copies; where it does so on the device they have not ended yet.
        self._store.keep_until_done(arrived)

    def _fail(self, fill: Fill, error: BaseException) -> None:
        self._errors.append(error)
        self._layer.table.fail_fill(fill.expert)
        self._store.tally.add(fills_failed=1)
