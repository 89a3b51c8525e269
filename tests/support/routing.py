"""What a routing hook saw, and a textbook cache to replay it through, which shares no code with the product's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tiny import NUM_LAYERS

__all__ = ["MTP", "Replay", "Routing"]

MTP = NUM_LAYERS
"""Number of the MTP head's MoE layer: it comes after those of the body."""


@dataclass
class Routing:
    """Records every look-up in order: (layer, experts per row), and when it was told."""

    calls: list[tuple[int, list[list[int]]]] = field(default_factory=list)
    told_ns: list[int] = field(default_factory=list)

    def __call__(self, layer: int, experts: list[list[int]]) -> None:
        self.told_ns.append(time.perf_counter_ns())
        self.calls.append((layer, [list(row) for row in experts]))

    def lookups(self) -> Iterator[tuple[int, list[int], bool]]:
        """(layer, distinct experts in the router's order, whether of a chunk) of every look-up of one generation.

        The head's rows are chunks; of the body's layers the first look-up is the prompt's.
        """
        seen: set[int] = set()
        for layer, rows in self.calls:
            experts = list(dict.fromkeys(expert for row in rows for expert in row))
            yield layer, experts, layer == MTP or layer not in seen
            seen.add(layer)

    def rows(self, layer: int) -> list[int]:
        """Rows of each look-up of one layer, in order."""
        return [len(rows) for number, rows in self.calls if number == layer]


@dataclass
class Replay:
    """A cache of least recent use as a textbook has it, a list per layer, coldest first; and the scan of a chunk."""

    num_slots: int
    hits: int = 0
    fills: int = 0
    evictions: int = 0
    waves: int = 0
    cache: dict[int, list[int]] = field(default_factory=dict)

    def serve(self, layer: int, experts: list[int], is_chunk: bool) -> None:
        """One look-up. Of a chunk that does not fit, a quarter of the slots passes the rest through."""
        cache, passes = self.cache.setdefault(layer, []), 0
        if not is_chunk or len(experts) <= self.num_slots:
            passes = self._use(cache, experts, self.num_slots, is_cold=False)
        else:
            few = self.num_slots // 4
            ranked = [e for e in experts if e in cache] + [e for e in experts if e not in cache]
            kept = ranked[: self.num_slots - few]
            passes = self._use(cache, [e for e in experts if e in kept], self.num_slots, is_cold=False)
            passes += self._use(cache, ranked[len(kept) :], few, is_cold=True)
        self.waves += passes - 1

    def _use(self, cache: list[int], pending: list[int], at_most: int, *, is_cold: bool) -> int:
        passes = 0
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
            self.hits, self.fills = self.hits + len(hits), self.fills + len(fills)
            pending, passes = absent[len(fills) :], passes + 1
        return passes
