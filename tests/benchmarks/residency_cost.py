"""What one look-up with a miss costs in the residency table, by number of slots (contract 2.10: eviction is O(1)).

Run: python tests/benchmarks/residency_cost.py [--lookups N] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from random import Random

import torch

import expertstream
from expertstream.memory.policy import make_policy
from expertstream.memory.slots import SlotTable

SIZES = (64, 16_384)
NUM_HITS = 3
"""Residents that each look-up wants beside the one absent expert."""

WARM_LOOKUPS = 2_000


class Workload:
    """A full table whose every look-up wants some residents and one expert that is absent, all drawn at random.

    Args:
        policy: A registered name.
        num_slots: Slots; there are twice as many experts.
    """

    def __init__(self, policy: str, num_slots: int) -> None:
        self.random = Random(0)
        self.table = SlotTable(num_slots, make_policy(policy, 2 * num_slots))
        self.resident = list(range(num_slots))
        self.absent = list(range(num_slots, 2 * num_slots))
        # Where an expert is in the one or the other list: searching them would cool the caches that are measured.
        self.place = [*range(num_slots), *range(num_slots)]
        self.age = 0
        for expert in self.resident:
            self.look_up([expert])
        for _ in range(WARM_LOOKUPS):
            self.look_up(self.draw())

    def draw(self) -> list[int]:
        """Return the experts of the next look-up: distinct residents and one that is absent."""
        chosen = {self.resident[self.random.randrange(len(self.resident))] for _ in range(NUM_HITS)}
        return [*chosen, self.absent[self.random.randrange(len(self.absent))]]

    def look_up(self, experts: list[int]) -> int:
        """Decide and carry out, as a decode step does; return the nanoseconds that took."""
        table, age = self.table, self.age
        started = time.perf_counter_ns()
        decision = table.decide(experts)
        for fill in decision.fills:
            table.begin_fill(fill)
            table.end_fill(fill.expert)
        for expert in experts:
            table.policy.touch(expert, age)
        spent = time.perf_counter_ns() - started
        for fill in decision.fills:
            if fill.victim is not None:
                here, there = self.place[fill.victim], self.place[fill.expert]
                self.resident[here], self.absent[there] = fill.expert, fill.victim
                self.place[fill.expert], self.place[fill.victim] = here, there
        self.age += 1
        return spent


def measure(policy: str, num_slots: int, lookups: int, repeats: int) -> float:
    """Return the nanoseconds of one look-up with a miss: the least of `repeats` means, the one least disturbed."""
    workload = Workload(policy, num_slots)
    means = [sum(workload.look_up(workload.draw()) for _ in range(lookups)) / lookups for _ in range(repeats)]
    workload.table.check_integrity()
    return min(means)


def main() -> None:
    """Measure both policies at both sizes and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookups", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    result: dict[str, object] = {
        "benchmark": "residency_cost",
        "unit": "ns per look-up of 3 residents and 1 absent expert",
        "lookups": given.lookups,
        "repeats": given.repeats,
        "versions": {
            "expertstream": expertstream.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "machine": {"system": platform.system(), "processor": platform.machine()},
    }
    for policy in ("lru", "lrfu"):
        costs = {num_slots: measure(policy, num_slots, given.lookups, given.repeats) for num_slots in SIZES}
        few, many = costs.values()
        result[policy] = {str(size): round(cost) for size, cost in costs.items()} | {"ratio": round(many / few, 2)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
