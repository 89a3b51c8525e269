"""One record: the quick check agrees with the statistics record's own."""

from __future__ import annotations

import random

from expertstream.scheduler.report import counts
from expertstream.steps.statistics import Statistics, StepsByKind

SOUND = Statistics(
    steps=3, steps_by_kind=StepsByKind({"paged": 2, "draft": 1}), lookups=9, hits=4, joins=1, misses=3, forced=1,
    fills=1, fills_failed=1, exhausted=1, evictions=2, bytes=7, prefetch_issued=4, prefetch_used=1, prefetch_late=1,
    prefetch_wasted=1, prefetch_pending=1, step_ns=5, stall_ns=5,
)  # fmt: skip


def test_counts_quick_check_agrees_with_the_record_after_every_single_change() -> None:
    """Contract 3.3: a record is called sound exactly when `Statistics.violations` names nothing."""
    chance = random.Random(1)
    sound = counts.read(SOUND.as_dict())
    assert isinstance(sound, tuple)
    assert counts.invariants(sound) == []
    num_broken = 0
    for _ in range(3000):
        changed = list(sound)
        for _ in range(chance.choice([1, 1, 2])):
            changed[chance.randrange(len(changed))] += chance.choice([-8, -1, 1, 2])
        record = counts.as_mapping(tuple(changed))
        kinds = {name.partition(".")[2]: value for name, value in record.items() if "." in name}
        own = Statistics.from_dict({**record, "steps_by_kind": kinds}).violations()
        assert counts.invariants(tuple(changed)) == own
        assert counts._is_sound(record) == (own == [])
        num_broken += bool(own)
    assert 500 < num_broken < 3000


def test_counts_falls_exempt_the_gauge_alone() -> None:
    """Contract 3.1: every figure but `prefetch_pending` only grows."""
    record = counts.read(SOUND.as_dict())
    assert isinstance(record, tuple)
    fallen = set()
    for index in range(len(record)):
        less = (*record[:index], record[index] - 1, *record[index + 1 :])
        fallen |= {text.partition(" ")[0] for text in counts.falls(record, less)}
        assert counts.falls(less, record) == []
    names = set(counts.as_mapping(record))
    assert names - fallen == {"prefetch_pending"}


def test_counts_total_of_none_is_zero() -> None:
    """Contract 4.4: the totals of `"stores": []` are zeros."""
    zero = counts.read(Statistics.zero().as_dict())
    assert counts.total([]) == zero
