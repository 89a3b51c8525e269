"""Offline replay against an independent cache and against a running store."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import open_store

from expertstream.memory.replay import replay

NUM_EXPERTS = 10
TRACES = st.lists(st.lists(st.integers(0, NUM_EXPERTS - 1), unique=True, max_size=4), max_size=60)


def _naive_lru(trace: list[list[int]], num_slots: int) -> tuple[int, int]:
    """Least recent use as a textbook has it, but that no expert of an entry makes room for another of it."""
    cache: list[int] = []
    hits = misses = 0
    for entry in trace:
        present = [expert for expert in entry if expert in cache]
        hits, misses = hits + len(present), misses + len(entry) - len(present)
        for _ in range(len(entry) - len(present) - (num_slots - len(cache))):
            cache.remove(next(expert for expert in cache if expert not in entry))
        cache = [expert for expert in cache if expert not in entry] + entry
    return hits, misses


@settings(derandomize=True, max_examples=200, deadline=None)
@given(TRACES, st.integers(4, NUM_EXPERTS))
def test_lru_replay_equals_a_textbook_lru(trace: list[list[int]], num_slots: int) -> None:
    """Contract 2.10: replay gives the hits and misses of least recent use, for any trace."""
    assert replay(trace, policy="lru", num_slots=num_slots, num_experts=NUM_EXPERTS) == _naive_lru(trace, num_slots)


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_replay_takes_the_decisions_of_a_running_store(tmp_path: Path, policy: str) -> None:
    """Contract 2.10: the trace of decode steps gives offline what the engine counted."""
    random = Random(3)
    trace = [random.sample(range(NUM_EXPERTS), random.randrange(1, 5)) for _ in range(150)]
    with open_store(tmp_path, num_experts=NUM_EXPERTS, num_slots=5, policy=policy) as tiny:
        for experts in trace:
            tiny.serve(experts)
            tiny.store.age += 1
        counted = (tiny.total.hits, tiny.total.misses)
    assert replay(trace, policy=policy, num_slots=5, num_experts=NUM_EXPERTS) == counted


def test_all_slots_give_one_miss_per_distinct_expert_and_fewer_slots_fewer_hits() -> None:
    """A budget has an effect: all slots miss each expert once, top-k slots hit less on the same trace."""
    random = Random(1)
    trace = [random.sample(range(NUM_EXPERTS), 3) for _ in range(100)]
    hits, misses = replay(trace, policy="lru", num_slots=NUM_EXPERTS, num_experts=NUM_EXPERTS)
    assert (hits, misses) == (300 - NUM_EXPERTS, NUM_EXPERTS)
    assert replay(trace, policy="lru", num_slots=3, num_experts=NUM_EXPERTS)[0] < hits


def test_entry_wider_than_the_slots_is_refused_with_its_place() -> None:
    """An entry that a decode step would serve in waves has no single answer."""
    with pytest.raises(ValueError, match="trace entry 1 names 3 experts; the layer has 2 slots"):
        replay([[0], [1, 2, 3]], policy="lru", num_slots=2, num_experts=4)


def test_unknown_policy_is_refused() -> None:
    """A wrong name says which there are."""
    with pytest.raises(ValueError, match="registered are lru, lrfu"):
        replay([], policy="best", num_slots=2, num_experts=4)
