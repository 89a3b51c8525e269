"""The residency table: what is decided, and that whatever is carried out leaves it whole."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertstream.memory.policy import LeastRecent, make_policy
from expertstream.memory.slots import Decision, Fill, SlotTable


def _table(num_slots: int, residents: int = 0) -> SlotTable:
    table = SlotTable(num_slots, LeastRecent(64))
    for fill in table.decide(range(residents)).fills:
        table.begin_fill(fill)
        table.end_fill(fill.expert)
        table.policy.touch(fill.expert, 0)
    table.check_integrity()
    return table


def test_decide_takes_free_slots_in_the_routers_order() -> None:
    """An empty table evicts nobody."""
    assert _table(4).decide([9, 7]) == Decision((), (Fill(9, 0, None), Fill(7, 1, None)), ())


def test_decide_finds_hits_before_it_chooses_a_victim() -> None:
    """A resident that is wanted later in the same look-up makes room for nobody, though it is the coldest."""
    table = _table(3, residents=3)
    decision = table.decide([8, 0])
    assert decision.hits == ((0, 0),)
    assert decision.fills == (Fill(8, 1, 1),)


def test_decide_evicts_the_least_recent_that_is_not_held() -> None:
    """Contract 2.5: a held expert is passed over, and is again a victim once it is released."""
    table = _table(3, residents=3)
    table.hold(0)
    table.hold(0)
    table.release(0)
    assert table.is_held(0)
    assert table.decide([8]).fills == (Fill(8, 1, 1),)
    table.release(0)
    assert table.decide([8]).fills == (Fill(8, 0, 0),)


def test_decide_with_all_slots_held_gives_no_slot_away() -> None:
    """No slot is taken from who uses it: the rest waits."""
    table = _table(2, residents=2)
    table.hold(0)
    table.hold(1)
    assert table.decide([5, 6]) == Decision((), (), (5, 6))


def test_decide_while_a_fill_is_in_flight_does_not_take_its_slot() -> None:
    """A slot that a copy writes is nobody's victim."""
    table = _table(2, residents=1)
    (fill,) = table.decide([5]).fills
    table.begin_fill(fill)
    table.hold(0)
    assert table.decide([6]).rest == (6,)
    table.end_fill(5)
    table.policy.touch(5, 0)
    assert table.decide([6]).fills == (Fill(6, fill.slot, 5),)


def test_decide_with_more_experts_than_slots_leaves_the_rest_in_order() -> None:
    """Contract 2.8: what does not fit is left for the next wave; hits are all in the first."""
    table = _table(3, residents=3)
    decision = table.decide([10, 11, 2, 12, 13])
    assert [expert for expert, _ in decision.hits] == [2]
    assert [fill.expert for fill in decision.fills] == [10, 11]
    assert decision.rest == (12, 13)
    assert len({fill.slot for fill in decision.fills} | {slot for _, slot in decision.hits}) == 3


def test_decide_evicts_at_most_what_it_is_allowed() -> None:
    """A scan's passes take free slots as they are and evict few."""
    table = _table(4, residents=3)
    decision = table.decide([10, 11, 12, 13], max_evictions=2)
    assert [fill.victim for fill in decision.fills] == [None, 0]
    assert decision.rest == (12, 13)
    assert table.decide([10, 11], max_evictions=1).fills == (Fill(10, 3, None),)
    assert table.decide([10, 11], max_evictions=0).rest == (11,)


def test_decide_changes_nothing() -> None:
    """Deciding twice gives the same answer."""
    table = _table(3, residents=2)
    before = repr(table)
    assert table.decide([5, 6]) == table.decide([5, 6])
    assert repr(table) == before == "<SlotTable 3 slots: 2 resident, 0 held, 0 in flight, 1 free>"


def test_failed_fill_frees_the_slot_and_loses_nobody_else() -> None:
    """Contract 2.7: a fill that fails leaves nothing resident in its slot."""
    table = _table(2, residents=2)
    (fill,) = table.decide([5]).fills
    table.begin_fill(fill)
    table.fail_fill(5)
    table.check_integrity()
    assert table.slot_of(5) is None
    assert table.slot_of(1) == 1
    assert table.decide([5]).fills == (Fill(5, fill.slot, None),)


def test_fill_given_up_before_it_began_keeps_its_victim() -> None:
    """Contract 2.7: fills of one decision are carried out or left out one by one, in any order."""
    table = _table(4, residents=2)
    first, second, third = table.decide([5, 6, 7]).fills
    table.begin_fill(second)
    table.end_fill(6)
    table.policy.touch(6, 0)
    table.check_integrity()
    assert third.victim == 0
    assert table.slot_of(0) == 0
    table.begin_fill(first)
    table.fail_fill(5)
    table.check_integrity()


def test_held_expert_cannot_be_evicted() -> None:
    """Our own invariant: whoever tries to evict a held expert, or to hold an absent one, is stopped."""
    table = _table(1, residents=1)
    (fill,) = table.decide([5]).fills
    table.hold(0)
    with pytest.raises(AssertionError, match="expert 0 is held"):
        table.begin_fill(fill)
    with pytest.raises(AssertionError, match="expert 0 is held"):
        table.evict(0)
    with pytest.raises(AssertionError, match="expert 5 is not resident"):
        table.hold(5)
    table.check_integrity()


def test_integrity_check_sees_a_slot_that_two_experts_have() -> None:
    """The check itself can fail."""
    table = _table(2, residents=2)
    table._slot_of[1] = 0
    with pytest.raises(AssertionError, match="not a partition"):
        table.check_integrity()


class SlotTableMachine(RuleBasedStateMachine):
    """Whatever a step does to a table, in whatever order, every slot is free, in flight or resident."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(4, make_policy("lrfu", 12))
        self.random = Random(0)
        self.in_flight: set[int] = set()
        self.resident: set[int] = set()
        self.holds: dict[int, int] = {}
        self.age = 0

    def _pick(self, among: set[int] | dict[int, int]) -> int:
        return self.random.choice(sorted(among))

    @rule(expert=st.integers(0, 11), limit=st.sampled_from([None, 0, 1]))
    def begin(self, expert: int, limit: int | None) -> None:
        if expert in self.in_flight:
            return
        decision = self.table.decide([expert], max_evictions=limit)
        if expert in self.resident:
            assert [found for found, _ in decision.hits] == [expert]
            return
        can_evict = limit != 0 and any(resident not in self.holds for resident in self.resident)
        has_free = len(self.resident) + len(self.in_flight) < 4
        assert bool(decision.fills) == (has_free or can_evict)
        for fill in decision.fills:
            assert (fill.victim is None) == has_free
            assert fill.victim not in self.holds
            self.resident.discard(-1 if fill.victim is None else fill.victim)
            self.table.begin_fill(fill)
            self.in_flight.add(expert)

    @precondition(lambda self: bool(self.in_flight))
    @rule(is_cold=st.booleans())
    def end(self, is_cold: bool) -> None:
        expert = self._pick(self.in_flight)
        self.table.end_fill(expert)
        if is_cold:
            self.table.policy.add_cold(expert)
        else:
            self.table.policy.touch(expert, self.age)
        self.in_flight.discard(expert)
        self.resident.add(expert)

    @precondition(lambda self: bool(self.in_flight))
    @rule()
    def fail(self) -> None:
        expert = self._pick(self.in_flight)
        self.table.fail_fill(expert)
        self.in_flight.discard(expert)

    @precondition(lambda self: bool(self.resident))
    @rule()
    def hold(self) -> None:
        expert = self._pick(self.resident)
        self.table.hold(expert)
        self.holds[expert] = self.holds.get(expert, 0) + 1

    @precondition(lambda self: bool(self.holds))
    @rule()
    def release(self) -> None:
        expert = self._pick(self.holds)
        self.table.release(expert)
        self.holds[expert] -= 1
        self.holds = {held: count for held, count in self.holds.items() if count}

    @precondition(lambda self: bool(self.resident))
    @rule(advance=st.integers(0, 20))
    def touch(self, advance: int) -> None:
        self.age += advance
        self.table.policy.touch(self._pick(self.resident), self.age)

    @precondition(lambda self: bool(self.resident - set(self.holds)))
    @rule()
    def evict(self) -> None:
        expert = self._pick(self.resident - set(self.holds))
        self.table.evict(expert)
        self.resident.discard(expert)

    @invariant()
    def is_whole(self) -> None:
        self.table.check_integrity()
        assert set(self.table.policy.victims()) == self.resident
        assert self.table.num_resident == len(self.resident)
        assert self.table.num_held == len(self.holds)


TestSlotTableMachine = SlotTableMachine.TestCase
TestSlotTableMachine.settings = settings(derandomize=True, max_examples=100, stateful_step_count=30, deadline=None)
