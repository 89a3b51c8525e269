"""Which resident expert goes first: replacement policies as plug-ins, O(1) per touch, fill and eviction.

A policy sees one layer. It is told which resident expert was used and at what *age* (the number of `paged` steps ended
before this use, so that drafts do not age experts faster than tokens do), and it yields victims, coldest first. What it
remembers of an expert may survive the expert's eviction. It does no I/O, has no clock of its own and can therefore be
replayed offline over a recorded trace (`memory.replay`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

__all__ = ["LeastRecent", "Policy", "RecencyFrequency", "make_policy", "policy_names", "register_policy"]


class Policy(Protocol):
    """The order in which one layer's resident experts are given up."""

    def touch(self, expert: int, age: int) -> None:
        """Note that a resident expert was used at `age`; a newly resident one is touched once it is filled."""

    def add_cold(self, expert: int) -> None:
        """Note a newly resident expert that a scan brought in: it goes before every expert that was touched."""

    def victims(self) -> Iterator[int]:
        """Yield resident experts, coldest first. The table is not changed while this is iterated."""

    def remove(self, expert: int) -> None:
        """Note that an expert is no longer resident. Its history may be kept."""


_MAX_WALK = 256
"""Steps: a wider gap between buckets is jumped over. Wider than the times of experts in use lie apart (see below)."""


class LeastRecent:
    """Least recently used first."""

    def __init__(self, num_experts: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, expert: int, age: int) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert)

    def add_cold(self, expert: int) -> None:
        self._order[expert] = None
        self._order.move_to_end(expert, last=False)

    def victims(self) -> Iterator[int]:
        return iter(self._order)

    def remove(self, expert: int) -> None:
        del self._order[expert]

    def __repr__(self) -> str:
        return f"<LeastRecent {len(self._order)} resident>"


class RecencyFrequency:
    """Least recently and least frequently used first, with one half-life; the history survives eviction.

    Each use counts 1 and halves every `half_life` paged steps. Comparing such sums needs no decay: the sum's logarithm,
    expressed as a time, changes only on a use (`t' = h·log2(2^(t/h) + 2^(now/h))`). Times are kept in whole-step
    buckets; a use raises a time to at least now and to less than now + `half_life`·log2(1 + 1/(2^(1/h) − 1)) + 1, so
    finding the lowest bucket is bounded work however many slots there are. Only where nothing was used for long are all
    buckets looked through, at most once per so many steps.

    Source: D. Lee et al., "LRFU: a spectrum of policies that subsumes the LRU and LFU policies", IEEE Trans. Computers
    50 (12), 2001; the bucketed virtual time is ours.
    """

    half_life = 16.0
    """Paged steps after which one use counts half."""

    def __init__(self, num_experts: int) -> None:
        self._time = [-math.inf] * num_experts
        self._buckets: dict[int, OrderedDict[int, None]] = {}
        self._bucket_of: dict[int, int] = {}
        self._lowest = 0
        self._highest = 0
        self._cold: OrderedDict[int, None] = OrderedDict()

    def touch(self, expert: int, age: int) -> None:
        h = self.half_life
        gap = (self._time[expert] - age) / h
        # log2(2^gap + 1), written so that neither an ancient nor a future time overflows.
        raised = max(gap, 0.0) + math.log2(1.0 + 2.0 ** -abs(gap)) if gap > -64 else 0.0
        self._time[expert] = age + h * raised
        if expert in self._bucket_of or expert in self._cold:
            self.remove(expert)
        bucket = math.floor(self._time[expert])
        if not self._bucket_of or bucket < self._lowest:
            self._lowest = bucket
        self._highest = max(self._highest, bucket) if self._bucket_of else bucket
        self._bucket_of[expert] = bucket
        self._buckets.setdefault(bucket, OrderedDict())[expert] = None

    def add_cold(self, expert: int) -> None:
        self._cold[expert] = None

    def victims(self) -> Iterator[int]:
        yield from self._cold
        bucket = self._next_bucket(self._lowest)
        self._lowest = self._lowest if bucket is None else bucket
        while bucket is not None:
            yield from self._buckets[bucket]
            bucket = self._next_bucket(bucket + 1)

    def remove(self, expert: int) -> None:
        if expert in self._cold:
            del self._cold[expert]
            return
        bucket = self._bucket_of.pop(expert)
        members = self._buckets[bucket]
        del members[expert]
        if not members:
            del self._buckets[bucket]

    def _next_bucket(self, first: int) -> int | None:
        if first > self._highest or not self._buckets:
            return None
        for bucket in range(first, first + _MAX_WALK):
            if bucket in self._buckets:
                return bucket
        return min((bucket for bucket in self._buckets if bucket >= first), default=None)

    def __repr__(self) -> str:
        return f"<RecencyFrequency {len(self._bucket_of) + len(self._cold)} resident>"


_FACTORIES: dict[str, Callable[[int], Policy]] = {"lru": LeastRecent, "lrfu": RecencyFrequency}


def register_policy(name: str, factory: Callable[[int], Policy]) -> None:
    """Make a policy known by a name: as the setting `policy` of engines opened from then on, and in `replay`.

    Args:
        name: Not yet taken.
        factory: Called once per MoE layer with the number of experts of that layer.

    Raises:
        ValueError: When the name is taken.
    """
    if name in _FACTORIES:
        raise ValueError(f"policy {name!r} is already registered; registered are {', '.join(policy_names())}")
    _FACTORIES[name] = factory


def policy_names() -> tuple[str, ...]:
    """Return the registered names, in order of registration."""
    return tuple(_FACTORIES)


def make_policy(name: str, num_experts: int) -> Policy:
    """Return a fresh policy for one layer.

    Raises:
        ValueError: When no such policy is registered; the message lists those that are.
    """
    if name not in _FACTORIES:
        raise ValueError(f"unknown policy {name!r}; registered are {', '.join(policy_names())}")
    return _FACTORIES[name](num_experts)
