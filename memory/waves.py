"""In which order a layer's experts are served when they do not fit its slots at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .slots import SlotTable

__all__ = ["Wave", "order_waves"]

SCAN_SHARE = 4
"""A scan passes through at most one slot in this many (at least one), so that the rest keeps what decoding lives on."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Experts to serve, in as many passes as their slots demand.

    Attributes:
        experts: Distinct, in order.
        is_cold: The experts do not count as used: residents keep their rank, newcomers go first.
        max_evictions: Residents to evict per pass at most, and none while so many slots are free; None is no limit.
    """

    experts: tuple[int, ...]
    is_cold: bool
    max_evictions: int | None


def order_waves(table: SlotTable, experts: Sequence[int], recent: Collection[int] | None) -> tuple[Wave, ...]:
    """Order distinct experts into waves.

    What fits at once is one wave in the router's order, and every expert counts as used. What does not fit is a scan:
    the recent experts come first and count as used, so that they stay for the decoding that follows; the others then
    pass through few slots, the coldest, without counting as used. Of more recent experts than the remaining slots can
    keep, the residents come first: to evict one for another would only flush what decoding lives on.
    (Contract 2.8, 2.10.)

    Args:
        table: The layer's residency.
        experts: Distinct, in the router's order.
        recent: The experts that count as used; None: all of them.
    """
    if recent is None or len(experts) <= table.num_slots:
        return (Wave(tuple(experts), False, None),) if experts else ()
    scan_slots = max(1, table.num_slots // SCAN_SHARE)
    # Residents before absentees: they are hits as long as nothing is evicted, and evicting is what absentees do.
    residents_first = sorted(experts, key=lambda expert: table.slot_of(expert) is None)
    counted = set(recent)
    kept = set([e for e in residents_first if e in counted][: table.num_slots - scan_slots])
    first = Wave(tuple(expert for expert in experts if expert in kept), False, None)
    scan = Wave(tuple(expert for expert in residents_first if expert not in kept), True, scan_slots)
    return tuple(wave for wave in (first, scan) if wave.experts)
