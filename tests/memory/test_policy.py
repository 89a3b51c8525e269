"""The shipped policies against brute-force ones, and policies as plug-ins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import open_store

from expertstream.memory import policy as module
from expertstream.memory.policy import (
    LeastRecent,
    Policy,
    RecencyFrequency,
    make_policy,
    policy_names,
    register_policy,
)

NUM_EXPERTS = 12

# (advance the age by so much, expert to touch or to bring in, whether as a scan does)
EVENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, NUM_EXPERTS - 1), st.integers(0, 5)), max_size=80)


class BruteForce:
    """Least recency and frequency, summed from every use there ever was: Σ 2^(−(now − use) / half-life)."""

    def __init__(self) -> None:
        self.uses: dict[int, list[int]] = {}
        self.resident: list[int] = []
        self.cold: list[int] = []

    def touch(self, expert: int, age: int) -> None:
        self.uses.setdefault(expert, []).append(age)
        self.resident = [e for e in self.resident if e != expert] + [expert]
        self.cold = [e for e in self.cold if e != expert]

    def add_cold(self, expert: int) -> None:
        self.cold.append(expert)

    def remove(self, expert: int) -> None:
        self.resident = [e for e in self.resident if e != expert]
        self.cold = [e for e in self.cold if e != expert]

    def time(self, expert: int) -> float:
        """The age at which one single use would weigh as much as all uses of this expert do."""
        half_life, last = RecencyFrequency.half_life, self.uses[expert][-1]
        total = sum(2.0 ** ((age - last) / half_life) for age in self.uses[expert])
        return last + half_life * math.log2(total)

    def victims(self) -> list[int]:
        # A stable sort: within a whole step, who was used first goes first.
        return self.cold + sorted(self.resident, key=lambda expert: math.floor(self.time(expert)))


@settings(derandomize=True, max_examples=200, deadline=None)
@given(EVENTS)
def test_lrfu_orders_victims_as_the_sum_over_all_uses_does(events: list[tuple[int, int, int]]) -> None:
    """The virtual time is the decayed sum of all uses; the history counts again after an eviction."""
    policy, brute, age = RecencyFrequency(NUM_EXPERTS), BruteForce(), 0
    for advance, expert, kind in events:
        age += advance
        is_resident = expert in brute.resident or expert in brute.cold
        if kind == 5 and not is_resident:
            policy.add_cold(expert)
            brute.add_cold(expert)
        elif kind == 4 and is_resident:
            policy.remove(expert)
            brute.remove(expert)
        else:
            policy.touch(expert, age)
            brute.touch(expert, age)
            assert policy._time[expert] == pytest.approx(brute.time(expert), rel=0, abs=1e-6)
            if math.floor(policy._time[expert]) != math.floor(brute.time(expert)):
                return  # on the border of two whole steps rounding decides, and neither order is wrong
        assert list(policy.victims()) == brute.victims()


def test_lrfu_keeps_what_was_used_often_over_what_was_used_last() -> None:
    """Frequency counts: an expert of ten uses outlives one of a single later use, until it has aged."""
    policy = RecencyFrequency(4)
    for age in range(10):
        policy.touch(0, age)
    policy.touch(1, 10)
    assert list(policy.victims()) == [1, 0]
    policy.touch(2, 200)
    assert list(policy.victims()) == [1, 0, 2]
    policy.touch(1, 200)
    assert list(policy.victims()) == [0, 2, 1]


def test_lrfu_history_survives_eviction() -> None:
    """Contract 2.10: an expert that was evicted and comes back has its past with it."""
    policy = RecencyFrequency(4)
    for age in range(10):
        policy.touch(0, age)
    policy.remove(0)
    policy.touch(0, 10)
    policy.touch(1, 10)
    policy.touch(2, 10)
    assert list(policy.victims()) == [1, 2, 0]


def test_lrfu_age_that_does_not_advance_still_counts_uses() -> None:
    """Drafts do not advance the age; their uses count."""
    policy = RecencyFrequency(3)
    policy.touch(0, 5)
    policy.touch(0, 5)
    policy.touch(1, 5)
    assert list(policy.victims()) == [1, 0]


def test_lrfu_survives_very_long_gaps_and_runs() -> None:
    """Months of steps and millions of uses neither overflow nor lose the order."""
    policy = RecencyFrequency(3)
    policy.touch(0, 0)
    policy.touch(1, 10**9)
    for _ in range(2000):
        policy.touch(1, 10**9)
    policy.remove(0)
    policy.touch(0, 2 * 10**9)
    assert list(policy.victims()) == [1, 0]


@pytest.mark.parametrize("name", ["lru", "lrfu"])
def test_cold_experts_go_before_all_that_were_used(name: str) -> None:
    """Contract 2.10: what a scan brought in is given up first, until it is used."""
    policy = make_policy(name, 6)
    for expert in (0, 1):
        policy.touch(expert, 7)
    policy.add_cold(2)
    policy.add_cold(3)
    assert set(list(policy.victims())[:2]) == {2, 3}
    policy.touch(2, 8)
    assert list(policy.victims()) == [3, 0, 1, 2]
    policy.remove(3)
    assert list(policy.victims()) == [0, 1, 2]


def test_lru_gives_up_the_least_recently_used() -> None:
    """Least recent use first, whatever the age says."""
    policy = LeastRecent(4)
    for expert in (0, 1, 2, 0):
        policy.touch(expert, 0)
    assert list(policy.victims()) == [1, 2, 0]


def test_shipped_policies_are_known_by_name_and_unknown_ones_are_refused_with_the_list() -> None:
    """Contract 2.10: policies are chosen by name; a wrong one says which there are."""
    assert policy_names()[:2] == ("lru", "lrfu")
    assert isinstance(make_policy("lru", 4), LeastRecent)
    assert isinstance(make_policy("lrfu", 4), RecencyFrequency)
    with pytest.raises(ValueError, match="unknown policy 'lfu'; registered are lru, lrfu"):
        make_policy("lfu", 4)


class MostRecent(LeastRecent):
    """A plug-in: the most recently used goes first."""

    def victims(self) -> Iterator[int]:
        return reversed(self._order)


def test_registered_policy_decides_who_is_evicted_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 2.10: a policy of the user's own is chosen by its name and decides."""
    monkeypatch.setattr(module, "_FACTORIES", dict(module._FACTORIES))
    made: list[int] = []

    def factory(num_experts: int) -> Policy:
        made.append(num_experts)
        return MostRecent(num_experts)

    register_policy("mru", factory)
    assert policy_names() == ("lru", "lrfu", "mru")
    with pytest.raises(ValueError, match="'mru' is already registered"):
        register_policy("mru", factory)
    with open_store(tmp_path, num_experts=6, num_slots=3, num_layers=2, policy="mru") as tiny:
        assert made == [6, 6]
        tiny.serve([0, 1, 2])
        tiny.serve([3])
        assert tiny.residents() == {0, 1, 3}
