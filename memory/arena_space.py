"""The allocation under the host arena, cut into places of one record each, a pool per record size."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch

from .records import ExpertKey, RecordLayout, RecordSource

__all__ = ["ArenaSpace"]


class ArenaSpace:
    """One block of host memory, exactly as large as the places in it.

    Args:
        block: uint8 [Σ record bytes × places], host.
        places: Record bytes → number of places.
    """

    def __init__(self, block: torch.Tensor, places: Mapping[int, int]) -> None:
        self._block, self._places = block, dict(places)
        self._start: dict[int, int] = {}
        offset = 0
        for size, count in self._places.items():
            self._start[size] = offset
            offset += size * count
        if offset != block.numel():
            raise ValueError(f"arena block has {block.numel()} bytes; its places need {offset}")
        self._free = {size: list(range(count - 1, -1, -1)) for size, count in self._places.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of the block."""
        return self._block.numel()

    @property
    def record_sizes(self) -> tuple[int, ...]:
        """The record sizes, in bytes."""
        return tuple(self._places)

    def capacity(self, size: int) -> int:
        """Return the number of places for records of `size` bytes."""
        return self._places[size]

    def take_free(self, size: int) -> int | None:
        """Take a free place for a record of `size` bytes; None when there is none."""
        free = self._free[size]
        return free.pop() if free else None

    def give_back(self, size: int, place: int) -> None:
        """Make a place free again."""
        self._free[size].append(place)

    def record(self, size: int, place: int) -> torch.Tensor:
        """Return uint8 [size], the memory of one place."""
        start = self._start[size] + size * place
        return self._block[start : start + size]

    def choose_initial(
        self, sources: Mapping[ExpertKey, RecordSource], layouts: Mapping[int, RecordLayout]
    ) -> list[ExpertKey]:
        """Return the experts to read ahead, in the order of the layers: all, or an equal share of every layer."""
        by_size = sorted(sources, key=lambda key: (layouts[key.layer].num_bytes, key.expert, key.layer))
        chosen: list[ExpertKey] = []
        for size, group in groupby(by_size, key=lambda key: layouts[key.layer].num_bytes):
            chosen += list(group)[: self._places[size]]
        return sorted(chosen)
