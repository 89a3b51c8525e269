"""In which order experts that do not fit pass through the slots, and what a scan leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from stores import open_store

from expertstream.memory.policy import make_policy
from expertstream.memory.slots import SlotTable
from expertstream.memory.waves import Wave, order_waves


def _table(num_slots: int, residents: int) -> SlotTable:
    table = SlotTable(num_slots, make_policy("lru", 64))
    for fill in table.decide(range(residents)).fills:
        table.begin_fill(fill)
        table.end_fill(fill.expert)
        table.policy.touch(fill.expert, 0)
    return table


@pytest.mark.parametrize("recent", [None, {1}])
def test_what_fits_is_one_wave_in_the_routers_order(recent: set[int] | None) -> None:
    """Contract 2.8: experts that fit need no waves, and all of them count as used."""
    assert order_waves(_table(4, 4), [9, 0, 7, 1], recent) == (Wave((9, 0, 7, 1), False, None),)
    assert order_waves(_table(4, 0), [], recent) == ()


def test_decode_that_does_not_fit_counts_every_expert_as_used() -> None:
    """Contract 2.8: without a scan's mark, all experts of a step count."""
    assert order_waves(_table(2, 2), [5, 6, 7], None) == (Wave((5, 6, 7), False, None),)


def test_scan_serves_recent_experts_first_and_the_others_through_few_slots() -> None:
    """Contract 2.10: the recent ones count as used; the others, residents before absentees, do not."""
    waves = order_waves(_table(8, 8), [20, 21, 22, 3, 23, 24, 25, 4, 26], {22, 4})
    assert waves == (Wave((22, 4), False, None), Wave((3, 20, 21, 23, 24, 25, 26), True, 2))


def test_scan_through_one_slot_still_moves() -> None:
    """A table of one slot passes every expert through it."""
    assert order_waves(_table(1, 0), [5, 6], {5, 6}) == (Wave((5, 6), True, 1),)


def test_recent_experts_beyond_the_slots_leave_room_for_the_scan_and_spare_residents() -> None:
    """Contract 2.10: a prompt whose recent experts alone exceed the slots evicts no resident among them for another."""
    first, scan = order_waves(_table(8, 4), list(range(63, -1, -1)), set(range(64)))
    assert set(first.experts) == {0, 1, 2, 3, 63, 62}
    assert list(first.experts) == sorted(first.experts, reverse=True)
    assert not first.is_cold
    assert scan.is_cold
    assert set(first.experts) | set(scan.experts) == set(range(64))


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
@pytest.mark.parametrize("recent", [[], [40, 41, 42], list(range(60, 64)), list(range(64))])
@pytest.mark.parametrize("overlap", [True, False])
def test_prefill_over_all_experts_spares_the_decode_set(
    tmp_path: Path, policy: str, recent: list[int], overlap: bool
) -> None:
    """Contract 2.10: 8 warm experts, a prefill over 64 with 16 slots, the 8 again: 4 or more hits."""
    hot = list(range(8))
    with open_store(tmp_path, num_experts=64, num_slots=16, policy=policy) as tiny:
        for _ in range(4):
            tiny.serve(hot)
            tiny.store.age += 1
        batches = tiny.serve(list(range(63, -1, -1)), recent=recent, overlap=overlap)
        assert sorted(expert for batch in batches for expert in batch) == list(range(64))
        prefill, record_bytes = tiny.last, tiny.records.layouts[0].num_bytes
        assert (prefill.lookups, prefill.hits, prefill.misses) == (64, 8, 56)
        assert prefill.bytes == 56 * record_bytes
        assert prefill.waves >= 10
        tiny.store.age += 1
        tiny.serve(hot)
        assert tiny.last.hits >= (8 if len(recent) == 64 else 4)


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_recent_experts_of_a_prefill_are_resident_after_it(tmp_path: Path, policy: str) -> None:
    """Contract 2.10: slots are seeded from the last rows' choices, so that decoding begins with hits."""
    with open_store(tmp_path, num_experts=64, num_slots=16, policy=policy) as tiny:
        recent = [50, 3, 17, 61, 22, 9, 44, 30]
        tiny.serve(list(range(64)), recent=recent)
        tiny.serve(recent)
        assert tiny.last.hits == 8
