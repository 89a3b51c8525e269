"""The residency table of one layer: which expert is in which slot, which slots are held, what to evict.

`decide` is a plain function of the table: it changes nothing and returns what ought to happen. Whoever holds the open
step carries it out with `begin_fill`, `end_fill`, `fail_fill`, `hold` and `release`. Each is O(1) per expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .policy import Policy

__all__ = ["Decision", "Fill", "SlotTable"]


@dataclass(frozen=True, slots=True)
class Fill:
    """One copy to start. `victim` is the resident expert that makes room, None when the slot is free."""

    expert: int
    slot: int
    victim: int | None


@dataclass(frozen=True, slots=True)
class Decision:
    """What one look-up of distinct experts leads to.

    Attributes:
        hits: (expert, slot) of those resident.
        fills: Copies to start, in order.
        rest: Experts for which no slot can be had until this wave's are released.
    """

    hits: tuple[tuple[int, int], ...]
    fills: tuple[Fill, ...]
    rest: tuple[int, ...]


class SlotTable:
    """Slots 0 … num_slots − 1 of one layer.

    Args:
        num_slots: At least 1.
        policy: A fresh policy; owned by the table from here on.
    """

    def __init__(self, num_slots: int, policy: Policy) -> None:
        self.num_slots = num_slots
        self.policy = policy
        self._slot_of: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}
        self._holds: dict[int, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))

    def decide(self, experts: Sequence[int], *, max_evictions: int | None = None) -> Decision:
        """Decide for a set of distinct experts, in the router's order. Hits are found before any victim is chosen.

        Args:
            experts: Distinct.
            max_evictions: Evict only while fills, those of free slots included, are at most so many; what does not fit
                is `rest`. None is no limit.
        """
        hits, absent = [], []
        for expert in experts:
            if expert in self._slot_of:
                hits.append((expert, self._slot_of[expert]))
            else:
                absent.append(expert)
        if not absent:
            return Decision(tuple(hits), (), ())
        wanted = {expert for expert, _ in hits}
        fills = [Fill(expert, slot, None) for expert, slot in zip(absent, reversed(self._free))]
        limit = len(absent) - len(fills)
        limit = limit if max_evictions is None else max(0, min(limit, max_evictions - len(fills)))
        victims = (v for v in self.policy.victims() if v not in self._holds and v not in wanted)
        for expert, victim in zip(absent[len(fills) : len(fills) + limit], victims):
            fills.append(Fill(expert, self._slot_of[victim], victim))
        return Decision(tuple(hits), tuple(fills), tuple(absent[len(fills) :]))

    def begin_fill(self, fill: Fill) -> None:
        """Take the slot: the victim, if any, is resident no more and the expert is on its way."""
        if fill.victim is None:
            self._take_free(fill.slot)
        else:
            assert fill.victim not in self._holds, f"expert {fill.victim} is held and was to be evicted"
            del self._slot_of[fill.victim]
            self.policy.remove(fill.victim)
        self._in_flight[fill.expert] = fill.slot

    def evict(self, expert: int) -> None:
        """Drop a resident expert that is not held; its slot is free."""
        assert expert not in self._holds, f"expert {expert} is held and was to be evicted"
        self._free.append(self._slot_of.pop(expert))
        self.policy.remove(expert)

    def _take_free(self, slot: int) -> None:
        if self._free[-1] == slot:
            self._free.pop()
        else:  # only when an earlier fill of the same decision was given up
            self._free.remove(slot)

    def end_fill(self, expert: int) -> None:
        """The copy is done: the expert is resident. Its policy learns of it by `touch` or `add_cold`."""
        self._slot_of[expert] = self._in_flight.pop(expert)

    def fail_fill(self, expert: int) -> None:
        """The copy failed: nothing is resident in the slot, which is free again."""
        self._free.append(self._in_flight.pop(expert))

    def hold(self, expert: int) -> None:
        """Protect a resident expert from eviction until it is released as often as it was held."""
        assert expert in self._slot_of, f"expert {expert} is not resident and was to be held"
        self._holds[expert] = self._holds.get(expert, 0) + 1

    def release(self, expert: int) -> None:
        """Undo one `hold`."""
        if self._holds[expert] == 1:
            del self._holds[expert]
        else:
            self._holds[expert] -= 1

    def is_held(self, expert: int) -> bool:
        """Whether the expert is protected from eviction."""
        return expert in self._holds

    def slot_of(self, expert: int) -> int | None:
        """Return the slot of a resident expert, None when it is not resident."""
        return self._slot_of.get(expert)

    @property
    def num_resident(self) -> int:
        """Experts whose bytes are in a slot."""
        return len(self._slot_of)

    @property
    def num_held(self) -> int:
        """Experts protected from eviction."""
        return len(self._holds)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is exactly one of free, in flight or resident."""
        used = [*self._free, *self._in_flight.values(), *self._slot_of.values()]
        assert sorted(used) == list(range(self.num_slots)), f"slots are not a partition: {sorted(used)}"
        assert set(self._holds) <= set(self._slot_of), f"held but not resident: {set(self._holds) - set(self._slot_of)}"
        assert sorted(self.policy.victims()) == sorted(self._slot_of), "policy and table disagree on residents"

    def __repr__(self) -> str:
        return (
            f"<SlotTable {self.num_slots} slots: {self.num_resident} resident, {self.num_held} held, "
            f"{len(self._in_flight)} in flight, {len(self._free)} free>"
        )
