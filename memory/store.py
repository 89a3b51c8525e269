"""The expert store: serves the experts a layer wants from device slots, copying absent ones in, wave after wave.

This is where the decision of a `SlotTable` is carried out. It belongs to whoever holds the open step: one thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence

import torch

from ..kernels.runtime import Event, Runtime
from .arena import HostArena
from .copies import Copies, LayerSlots, Lease
from .outcome import Outcome, Tally
from .policy import make_policy
from .records import ExpertKey, RecordLayout
from .slots import Decision, SlotTable
from .waves import Wave, order_waves

__all__ = ["ExpertStore", "Lease", "Serving"]

POLL_S = 0.0001
"""How often a store whose host memory is full asks whether a copy has ended: a record takes longer than this."""


class ExpertStore:
    """Slots on the device for every MoE layer, and the host arena behind them.

    Args:
        runtime: Where slots live and copies run.
        arena: Where records come from.
        layouts: MoE layer → record layout.
        num_experts: MoE layer → number of experts.
        num_slots: MoE layer → number of slots, at least 1.
        policy: A registered policy name.

    Raises:
        MemoryError: When the device refuses the slots.
    """

    def __init__(
        self,
        runtime: Runtime,
        arena: HostArena,
        layouts: Mapping[int, RecordLayout],
        num_experts: Mapping[int, int],
        num_slots: Mapping[int, int],
        *,
        policy: str,
    ) -> None:
        self.runtime, self.arena = runtime, arena
        self.age = 0
        """Number of `paged` steps ended: the time by which policies age. Advanced by the step's owner."""
        self._num_experts = dict(num_experts)
        self.widest_share = 0.0
        """Largest share of a layer's experts that the step whose outcome was taken last has looked up."""
        self.is_overfull = False
        """Whether that step has looked up more experts of a layer than it has slots."""
        self.tally = Tally()
        """What happened since the step's owner last took it."""
        self._pending: deque[tuple[ExpertKey, Event]] = deque()
        block = runtime.allocate_device(sum(num_slots[n] * layouts[n].num_bytes for n in layouts))
        self._layers: dict[int, LayerSlots] = {}
        start = 0
        for number, layout in layouts.items():
            end = start + num_slots[number] * layout.num_bytes
            records = block[start:end]
            table = SlotTable(num_slots[number], make_policy(policy, num_experts[number]))
            parts = layout.views(records, num_slots[number])
            slots = torch.split(records, layout.num_bytes)
            self._layers[number] = LayerSlots(table, layout, slots, parts, [None] * num_slots[number], set())
            start = end
        self.num_bytes = block.numel()

    def parts(self, layer: int) -> dict[str, torch.Tensor]:
        """Return part name → tensor [num_slots, *part.shape] over this layer's slots, device, sharing their memory."""
        return self._layers[layer].parts

    def table(self, layer: int) -> SlotTable:
        """Return the residency table of a layer, for looking at."""
        return self._layers[layer].table

    def keep_until_done(self, copies: Iterable[tuple[ExpertKey, Event]]) -> None:
        """Keep the records held from which these copies read until they are done."""
        self._pending.extend(copies)
        self.settle()

    def settle(self, max_pending: int | None = None) -> None:
        """Let go of records whose copies are done, and count how long those took.

        Args:
            max_pending: Wait until at most so many copies are not done; None: do not wait.
        """
        released: list[ExpertKey] = []
        copy_ns = stall_ns = 0
        while self._pending:
            key, event = self._pending[0]
            if event.done():
                self._pending.popleft()
                released.append(key)
                copy_ns, stall_ns = copy_ns + event.copy_ns, stall_ns + event.stall_ns
            elif max_pending is None or len(self._pending) <= max_pending:
                break
            else:
                time.sleep(POLL_S)
        if released:
            self.arena.release(released)
            self.tally.add(copy_ns=copy_ns, stall_ns=stall_ns)

    def take_outcome(self) -> Outcome:
        """Return what happened in the step that ends here; a copy's time is told once it is done.

        Look-ups of the next step count anew: within a step an expert is looked up once, whichever row wants it.
        """
        self.runtime.drain()
        self.settle()
        self.widest_share, self.is_overfull = 0.0, False
        for number, layer in self._layers.items():
            wanted = len(layer.looked_up)
            self.widest_share = max(self.widest_share, wanted / self._num_experts[number])
            self.is_overfull |= wanted > layer.table.num_slots
            layer.looked_up.clear()
        return self.tally.take()

    def serve(self, layer: int, experts: Sequence[int], recent: Collection[int] | None, *, overlap: bool) -> Serving:
        """Serve distinct experts of a layer, to be iterated once.

        Args:
            layer: MoE layer number.
            experts: Distinct, in the router's order.
            recent: Of those, the ones that count as used when not all fit at once (a prefill's last rows'). None: all.
            overlap: Yield resident experts before the copies of absent ones are awaited. False: each wave at once.
        """
        state = self._layers[layer]
        waves = order_waves(state.table, experts, recent)
        return Serving(self, layer, waves, overlap)

    def __repr__(self) -> str:
        tables = [state.table for state in self._layers.values()]
        return (
            f"<ExpertStore {len(tables)} layers, {sum(t.num_slots for t in tables)} slots: "
            f"{sum(t.num_resident for t in tables)} resident, {sum(t.num_held for t in tables)} held>"
        )


class Serving:
    """One look-up being carried out: iterate it and compute each batch of leases before asking for the next."""

    def __init__(self, store: ExpertStore, layer: int, waves: Sequence[Wave], overlap: bool) -> None:
        self._store, self._number, self._waves, self._overlap = store, layer, waves, overlap
        self._layer = store._layers[layer]

    def __iter__(self) -> Generator[tuple[Lease, ...]]:
        passes = 0
        for wave in self._waves:
            pending = wave.experts
            while pending:
                decision = self._layer.table.decide(pending, max_evictions=wave.max_evictions)
                if len(decision.rest) == len(pending):
                    raise RuntimeError(f"no slot can be had for {len(pending)} experts: {self._layer.table!r}")
                self._count(decision, is_extra=passes > 0)
                yield from self._serve_pass(pending, decision, wave.is_cold)
                passes, pending = passes + 1, decision.rest

    def _count(self, decision: Decision, *, is_extra: bool) -> None:
        """Count a pass. A hit is a look-up once a step; an expert that was evicted since and comes again is another."""
        known = self._layer.looked_up
        hits = sum(expert not in known for expert, _ in decision.hits)
        misses = len(decision.fills)
        is_extra = is_extra or any(fill.expert in known for fill in decision.fills)
        self._store.tally.add(lookups=hits + misses, hits=hits, misses=misses, waves=int(is_extra))
        known.update(expert for expert, _ in decision.hits)
        known.update(fill.expert for fill in decision.fills)

    def _serve_pass(self, experts: Sequence[int], decision: Decision, is_cold: bool) -> Iterator[tuple[Lease, ...]]:
        hits = tuple(Lease(expert, slot) for expert, slot in decision.hits)
        self._hold(hits)
        if not decision.fills:
            try:
                yield from self._lend(hits)
            finally:
                self._end_pass(experts, hits, (), is_cold)
            return
        copies = Copies(self._store, self._number, self._layer, decision.fills)
        try:
            copies.start()
            split = self._overlap and bool(hits and decision.fills)
            if split:
                yield from self._lend(hits)
            filled = copies.finish()
            self._hold(filled)
            copies.raise_first()
            yield from self._lend(filled if split else hits + filled)
        finally:
            self._end_pass(experts, hits, copies.finish(), is_cold)

    def _lend(self, leases: tuple[Lease, ...]) -> Iterator[tuple[Lease, ...]]:
        try:
            yield leases
        finally:  # also when computing raised: what it had enqueued may still read the slots
            event = self._store.runtime.record_compute([self._layer.slots[lease.slot] for lease in leases])
            for lease in leases:
                self._layer.last_read[lease.slot] = event

    def _hold(self, leases: tuple[Lease, ...]) -> None:
        for lease in leases:
            self._layer.table.hold(lease.expert)

    def _end_pass(
        self, experts: Sequence[int], hits: tuple[Lease, ...], filled: tuple[Lease, ...], is_cold: bool
    ) -> None:
        table, age = self._layer.table, self._store.age
        served = {lease.expert for lease in hits + filled}
        for expert in served:
            if table.is_held(expert):
                table.release(expert)
        if is_cold:
            for lease in filled:
                table.policy.add_cold(lease.expert)
        else:  # in the router's order, whether hit or miss
            for expert in experts:
                if expert in served:
                    table.policy.touch(expert, age)
