"""The statistics record: its fields, its arithmetic, its invariants, and the accumulator behind it."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from dataclasses import fields, replace

import pytest

from expertstream.memory.outcome import Outcome
from expertstream.steps.clock import StepClock, StepRecord
from expertstream.steps.statistics import Counters, Statistics, StepsByKind

# Contract 3.2, word for word and in order.
FIELDS = [
    "steps",
    "steps_failed",
    "steps_by_kind",
    "tokens_prefill",
    "tokens_decode",
    "tokens_drafted",
    "tokens_accepted",
    "lookups",
    "hits",
    "joins",
    "misses",
    "fills",
    "fills_failed",
    "exhausted",
    "waves",
    "evictions",
    "bytes",
    "bytes_in_place",
    "prefetch_issued",
    "prefetch_used",
    "prefetch_late",
    "prefetch_wasted",
    "prefetch_pending",
    "bytes_prefetch",
    "reads",
    "bytes_disk",
    "advised",
    "forced",
    "step_ns",
    "stall_ns",
    "copy_ns",
    "host_ns",
]

SOUND = Statistics(
    steps=3,
    steps_failed=1,
    steps_by_kind=StepsByKind({"paged": 2, "draft": 1}),
    lookups=10,
    hits=4,
    joins=2,
    misses=3,
    forced=1,
    fills=1,
    fills_failed=1,
    exhausted=1,
    evictions=3,
    bytes=100,
    prefetch_issued=6,
    prefetch_used=1,
    prefetch_late=2,
    prefetch_wasted=1,
    prefetch_pending=2,
    step_ns=50,
    stall_ns=50,
)


def record(**outcome: int) -> StepRecord:
    return StepRecord("dense", 1, False, 9, 2, 5, 1, 0, 0, Outcome(**outcome))


def test_fields_are_those_of_the_contract_in_order() -> None:
    """Contract 3.2: the fields of a statistics record, in this order."""
    assert [field.name for field in fields(Statistics)] == FIELDS
    assert list(Statistics.zero().as_dict()) == FIELDS


def test_every_outcome_field_is_a_field_of_the_record() -> None:
    """What the memory floor reports is charged to the field of the same name, and to no other."""
    for name in (field.name for field in fields(Outcome)):
        counters = Counters()
        counters.add(Outcome(**{name: 3}))
        changed = {key: value for key, value in counters.snapshot().as_dict().items() if value not in (0, ZERO_KINDS)}
        assert changed == {name: 3}


ZERO_KINDS = {"paged": 0, "draft": 0, "dense": 0, "replay": 0}


def test_kinds_are_rendered_with_their_zeros() -> None:
    """Contract 3.2: steps_by_kind holds the four kinds, zeros present, and is plain JSON."""
    assert Statistics.zero().as_dict()["steps_by_kind"] == ZERO_KINDS
    assert json.loads(json.dumps(SOUND.as_dict()))["steps_by_kind"] == ZERO_KINDS | {"paged": 2, "draft": 1}
    assert SOUND.steps_by_kind["paged"] == 2


def test_kinds_refuse_an_unknown_one() -> None:
    """Contract 1.2: there are four kinds."""
    with pytest.raises(ValueError, match="warm"):
        StepsByKind({"warm": 1})
    with pytest.raises(KeyError):
        StepsByKind()["warm"]


def test_record_is_an_immutable_value() -> None:
    """A record is hashable, equal by value, and survives copying and pickling."""
    assert SOUND in {copy.deepcopy(SOUND), pickle.loads(pickle.dumps(SOUND))}
    with pytest.raises(AttributeError):
        SOUND.steps = 4  # type: ignore[misc]


def test_records_add_and_subtract_field_by_field() -> None:
    """Contract 3.1: any two records subtract."""
    assert SOUND + Statistics.zero() == SOUND
    assert (SOUND + SOUND).steps_by_kind == {"paged": 4, "draft": 2, "dense": 0, "replay": 0}
    assert SOUND + SOUND - SOUND == SOUND
    assert (SOUND - SOUND).as_dict() == Statistics.zero().as_dict()


def test_sound_record_breaks_nothing() -> None:
    """Contract 3.3: a record that reconciles has no violations; neither has one of zero steps."""
    assert SOUND.violations() == []
    assert Statistics.zero().violations() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hits": 5}, "lookups 10 is not hits 5 + joins 2 + misses 3 + forced 1 = 11"),
        ({"exhausted": 2}, "misses 3 is not fills 1 + fills_failed 1 + exhausted 2 = 4"),
        (
            {"prefetch_wasted": 0},
            "prefetch_issued 6 is not prefetch_used 1 + prefetch_late 2 + prefetch_wasted 0 + prefetch_pending 2 = 5",
        ),
        ({"evictions": 8}, "evictions 8 exceeds fills 1 + prefetch_issued 6 = 7"),
        ({"stall_ns": 51}, "stall_ns 51 exceeds step_ns 50 = 50"),
        ({"steps_failed": 4}, "steps_failed 4 exceeds steps 3 = 3"),
        (
            {"steps": 4},
            "steps 4 is not the sum of steps_by_kind {'paged': 2, 'draft': 1, 'dense': 0, 'replay': 0}",
        ),
        ({"bytes": 0}, "bytes 0 cannot be the record bytes of fills 1"),
        ({"waves": -1}, "waves is negative: -1"),
    ],
)
def test_broken_invariant_is_named_with_its_figures(change: dict[str, int], message: str) -> None:
    """Contract 3.3: every invariant that holds within one record is checked, and its breach says the figures."""
    assert replace(SOUND, **change).violations() == [message]  # type: ignore[arg-type]


def test_counter_that_fell_is_named_and_the_gauge_is_exempt() -> None:
    """Contract 3.3: a later record is never smaller in any counter; prefetch_pending is a gauge (3.1)."""
    later = SOUND + SOUND
    assert later.violations_since(SOUND) == []
    assert replace(later, prefetch_pending=0).violations_since(SOUND) == []
    assert replace(later, reads=-1).violations_since(SOUND) == ["reads fell from 0 to -1"]
    fewer = replace(later, steps_by_kind=StepsByKind({"paged": 1, "draft": 5}))
    assert fewer.violations_since(SOUND) == ["steps_by_kind.paged fell from 2 to 1"]


def test_rendered_record_is_read_back() -> None:
    """The record that is logged is the record that is read; fields of a later version are ignored."""
    assert Statistics.from_dict({**SOUND.as_dict(), "later": 1}) == SOUND


def test_record_with_a_field_missing_or_wrong_is_refused_by_name() -> None:
    """A cut or foreign record is refused, and the message names every field that is not an integer."""
    values: dict[str, object] = {**SOUND.as_dict(), "hits": "4", "misses": True}
    del values["reads"]
    with pytest.raises(ValueError, match="no integer in hits, misses, reads"):
        Statistics.from_dict(values)
    with pytest.raises(ValueError, match="steps_by_kind"):
        Statistics.from_dict({**SOUND.as_dict(), "steps_by_kind": 3})


def test_counters_commit_a_step_in_one_go() -> None:
    """A step is charged once, to its kind, with its tokens, durations and outcome."""
    counters = Counters()
    counters.commit(record(lookups=2, hits=1, misses=1, fills=1, bytes=8, stall_ns=3))
    counters.add(Outcome(prefetch_issued=1, prefetch_pending=1))
    expected = Statistics(
        steps=1,
        steps_by_kind=StepsByKind({"dense": 1}),
        tokens_prefill=5,
        tokens_decode=1,
        lookups=2,
        hits=1,
        misses=1,
        fills=1,
        bytes=8,
        prefetch_issued=1,
        prefetch_pending=1,
        step_ns=9,
        stall_ns=3,
        host_ns=2,
    )
    assert counters.snapshot() == expected
    assert expected.violations() == []


def test_counters_of_a_clock_show_an_open_step_only_when_it_ended() -> None:
    """A snapshot is consistent at step boundaries: what an open step did is not in it yet."""
    counters = Counters()
    clock = StepClock(on_end=counters.commit)
    with clock.step("paged") as step:
        step.add(Outcome(lookups=1, hits=1))
        assert counters.snapshot() == Statistics.zero()
    with pytest.raises(ValueError, match="body"), clock.step("paged"):
        raise ValueError("body")
    total = counters.snapshot()
    assert (total.steps, total.steps_failed, total.hits, repr(counters)) == (
        2,
        1,
        1,
        "<Counters 2 steps: 1 lookups, 0 misses>",
    )


def test_counters_lose_nothing_between_threads() -> None:
    """Additions from several threads all arrive."""
    counters = Counters()

    def run() -> None:
        for _ in range(300):
            counters.add(Outcome(reads=1, bytes_disk=2))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counters.snapshot().reads, counters.snapshot().bytes_disk) == (1200, 2400)
