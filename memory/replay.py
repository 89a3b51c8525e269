"""Replays recorded routing through a policy, offline: the decisions of a running engine without its model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .policy import make_policy
from .slots import SlotTable

__all__ = ["replay"]


def replay(trace: Iterable[Sequence[int]], *, policy: str, num_slots: int, num_experts: int) -> tuple[int, int]:
    """Replay one layer's routing offline: the same decisions as a running engine takes for decode steps.

    Args:
        trace: One entry per `paged` step: the distinct experts it wanted of this layer, in the router's order. An entry
            never names more experts than there are slots.
        policy: A registered name.
        num_slots: Slots of the layer.
        num_experts: Experts of the layer.

    Returns:
        (hits, misses).

    Raises:
        ValueError: When the policy is unknown, or an entry names more distinct experts than `num_slots`.
    """
    table = SlotTable(num_slots, make_policy(policy, num_experts))
    hits = misses = 0
    for age, experts in enumerate(trace):
        decision = table.decide(experts)
        if decision.rest:
            raise ValueError(f"trace entry {age} names {len(experts)} experts; the layer has {num_slots} slots")
        for fill in decision.fills:
            table.begin_fill(fill)
            table.end_fill(fill.expert)
        for expert in experts:
            table.policy.touch(expert, age)
        hits, misses = hits + len(decision.hits), misses + len(decision.fills)
    return hits, misses
