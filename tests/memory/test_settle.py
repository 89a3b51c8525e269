"""A runtime whose `wait` returns before the copy has ended, as on a GPU: what is let go and counted only then."""

from __future__ import annotations

from pathlib import Path

import torch
from stores import open_store

from expertstream.kernels.runtime import Event
from expertstream.kernels.scripted import ScriptedRuntime
from expertstream.memory.records import ExpertKey


class LateCopy:
    """A copy that whoever computes may rely on after `wait`, and that has ended only when the runtime says so."""

    def __init__(self, runtime: LateRuntime, copy: Event) -> None:
        self._runtime, self._copy, self.is_ended = runtime, copy, False

    @property
    def copy_ns(self) -> int:
        return 5 if self.is_ended else 0

    @property
    def stall_ns(self) -> int:
        return 7 if self.is_ended else 0

    def done(self) -> bool:
        self._runtime.polls += 1
        self.is_ended = self.is_ended or self._runtime.polls > self._runtime.ends_after
        return self.is_ended

    def wait(self) -> None:
        self._copy.wait()


class LateRuntime(ScriptedRuntime):
    """Every copy has ended once there were more polls than `ends_after`."""

    def __init__(self, ends_after: int) -> None:
        super().__init__()
        self.ends_after, self.polls = ends_after, 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Event | None) -> Event:
        return LateCopy(self, super().copy(destination, source, after=after))


def test_records_are_held_and_times_uncounted_until_copies_are_done(tmp_path: Path) -> None:
    """A copy that computing waits for on the device still reads its record; its time is told when it has ended."""
    runtime = LateRuntime(ends_after=1_000)
    with open_store(tmp_path, runtime=runtime) as tiny:
        tiny.serve([1, 2])
        assert (tiny.last.fills, tiny.last.copy_ns, tiny.last.stall_ns) == (2, 0, 0)
        assert tiny.arena._holds == {ExpertKey(0, 1): 1, ExpertKey(0, 2): 1}
        runtime.ends_after = 0
        tiny.serve([1])
        assert (tiny.last.hits, tiny.last.copy_ns, tiny.last.stall_ns) == (1, 10, 14)
        assert tiny.arena._holds == {}


def test_full_host_memory_waits_for_the_oldest_copy(tmp_path: Path) -> None:
    """Where the places are taken by records that are still copied from, the store waits for them, and no longer."""
    runtime = LateRuntime(ends_after=40)
    with open_store(tmp_path, runtime=runtime, num_slots=4, places=2) as tiny:
        tiny.serve([0, 1])
        assert runtime.polls < 40
        tiny.serve([2, 3])
        assert tiny.residents() == {0, 1, 2, 3}
        assert runtime.polls > 40
