"""What a routing hook saw, and a textbook cache to replay it through, which shares no code with the product's."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tiny import NUM_LAYERS

__all__ = ["MTP", "Replay", "Routing"]

MTP = NUM_LAYERS
"""Number of the MTP head's MoE layer: it comes after those of the body."""


Call = tuple[int, list[list[int]]]
"""One look-up: MoE layer, experts per row."""


@dataclass
class Routing:
    """A routing hook that keeps every look-up, and when it was told; steps apart if `ended` is told of their ends."""

    steps: list[list[Call]] = field(default_factory=lambda: [[]])
    told_ns: list[int] = field(default_factory=list)

    def __call__(self, layer: int, experts: list[list[int]]) -> None:
        self.told_ns.append(time.perf_counter_ns())
        self.steps[-1].append((layer, [list(row) for row in experts]))

    def ended(self, record: object) -> None:
        """Hears of the end of a step."""
        self.steps.append([])

    @property
    def calls(self) -> list[Call]:
        """Every look-up."""
        return [call for step in self.steps for call in step]

    def rows(self, layer: int) -> list[int]:
        """Rows that each step had in a layer, for the steps that came there."""
        per_step = ([len(rows) for number, rows in step if number == layer] for step in self.steps)
        return [sum(lengths) for lengths in per_step if lengths]

    def num_lookups(self) -> int:
        """Distinct experts, per layer, per step."""
        return sum(len({(layer, e) for layer, rows in step for row in rows for e in row}) for step in self.steps)


@dataclass
class Replay:
    """A cache of least recent use as a textbook has it, a list per layer, coldest first; and the scan of a chunk.

    Within a step an expert is looked up once, and once more for every time that it comes back after its eviction.
    """

    num_slots: int
    lookups: int = 0
    hits: int = 0
    fills: int = 0
    evictions: int = 0
    waves: int = 0
    cache: dict[int, list[int]] = field(default_factory=dict)
    known: set[tuple[int, int]] = field(default_factory=set)

    def run(self, steps: list[list[Call]]) -> None:
        """Replays a generation: the head's rows are chunks, and so is the body's first step."""
        for number, step in enumerate(steps):
            self.known.clear()
            for layer, rows in step:
                experts = list(dict.fromkeys(expert for row in rows for expert in row))
                self._serve(layer, experts, layer == MTP or number == 0)

    def _serve(self, layer: int, experts: list[int], is_chunk: bool) -> None:
        """One look-up. Of a chunk that does not fit, a quarter of the slots passes the rest through."""
        cache = self.cache.setdefault(layer, [])
        if not is_chunk or len(experts) <= self.num_slots:
            self._use(layer, experts, self.num_slots, is_cold=False, is_extra=False)
            return
        few = self.num_slots // 4
        ranked = [e for e in experts if e in cache] + [e for e in experts if e not in cache]
        kept = ranked[: self.num_slots - few]
        self._use(layer, [e for e in experts if e in kept], self.num_slots, is_cold=False, is_extra=False)
        self._use(layer, ranked[len(kept) :], few, is_cold=True, is_extra=True)

    def _use(self, layer: int, pending: list[int], at_most: int, *, is_cold: bool, is_extra: bool) -> None:
        cache = self.cache[layer]
        while pending:
            hits = [expert for expert in pending if expert in cache]
            absent = [expert for expert in pending if expert not in cache]
            num_free = self.num_slots - len(cache)
            fills = absent[: max(num_free, min(at_most, self.num_slots - len(hits)))]
            for _ in range(len(fills) - num_free):
                cache.remove(next(expert for expert in cache if expert not in hits))
                self.evictions += 1
            if is_cold:
                cache[:0] = reversed(fills)
            else:
                served = {*hits, *fills}
                cache[:] = [e for e in cache if e not in served] + [e for e in pending if e in served]
            new_hits = sum((layer, expert) not in self.known for expert in hits)
            self.hits, self.fills = self.hits + new_hits, self.fills + len(fills)
            self.lookups += new_hits + len(fills)
            self.waves += is_extra or any((layer, expert) in self.known for expert in fills)
            self.known.update((layer, expert) for expert in hits + fills)
            pending, is_extra = absent[len(fills) :], True
