"""The copies of a pass: a failure or an exception loses nothing else, and no slot is overwritten while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch
from stores import ScriptedReader, TinyStore, open_store, wait_until_read_ahead

from expertstream.kernels.cpu import CpuRuntime
from expertstream.kernels.runtime import CopyError, Event, Runtime
from expertstream.kernels.scripted import MissingWaitError, ScriptedCopy, ScriptedRuntime
from expertstream.memory.errors import ReadError
from expertstream.memory.records import ExpertKey


@pytest.fixture(params=["cpu", "scripted"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Both shipped runtimes: a real copy thread, and one that poisons and refuses a missing wait."""
    return CpuRuntime() if request.param == "cpu" else ScriptedRuntime()


@pytest.mark.parametrize("places", [None, 3])
def test_failed_read_evicts_nobody_and_a_retry_works(tmp_path: Path, runtime: Runtime, places: int | None) -> None:
    """Contract 2.7: the victim of a fill whose read failed is still resident; the other fills arrive; a retry works."""
    reader = ScriptedReader()
    reader.failing = {ExpertKey(0, 6)}
    with open_store(tmp_path, num_slots=3, places=places, runtime=runtime, reader=reader) as tiny:
        tiny.serve([0, 1, 2])
        with pytest.raises(ReadError, match=r"0-6\.bin.*offset 0"):
            tiny.serve([6])
        assert tiny.residents() == {0, 1, 2}
        assert (tiny.last.misses, tiny.last.fills_failed, tiny.last.evictions) == (1, 1, 0)
        with pytest.raises(ReadError):
            tiny.serve([2, 6, 7])
        assert tiny.residents() == {0, 2, 7}
        assert (tiny.last.misses, tiny.last.fills, tiny.last.fills_failed) == (2, 1, 1)
        reader.failing.clear()
        tiny.serve([6, 7])
        assert {6, 7} <= tiny.residents()
        assert "0 held" in repr(tiny.arena)


def _fail_expert(tiny: TinyStore, runtime: ScriptedRuntime, expert: int) -> None:
    wait_until_read_ahead(tiny.arena)
    record = tiny.arena._place[ExpertKey(0, expert)] * tiny.records.layouts[0].num_bytes

    def on_wait(copy: ScriptedCopy) -> None:
        if copy._source.storage_offset() == record:
            copy.fail(OSError("link down"))
        else:
            copy.finish()

    runtime.on_wait = on_wait


def test_failed_copy_leaves_nothing_resident_and_loses_no_other(tmp_path: Path) -> None:
    """Contract 2.7: a copy that fails frees its slot and counts; the others of its pass arrive; a retry works."""
    runtime = ScriptedRuntime()
    with open_store(tmp_path, num_slots=4, runtime=runtime) as tiny:
        tiny.serve([0, 1, 2, 3])
        _fail_expert(tiny, runtime, 5)
        with pytest.raises(CopyError, match="link down"):
            tiny.serve([3, 4, 5, 6])
        assert tiny.residents() == {3, 4, 6}
        last = tiny.last
        assert last.bytes == 2 * tiny.records.layouts[0].num_bytes
        assert (last.hits, last.misses, last.fills, last.fills_failed, last.evictions) == (1, 3, 2, 1, 3)
        runtime.on_wait = ScriptedCopy.finish
        tiny.serve([3, 4, 5, 6])
        assert (tiny.last.hits, tiny.last.fills, tiny.last.evictions) == (3, 1, 0)
        assert "0 held" in repr(tiny.arena)


class RefusingRuntime(ScriptedRuntime):
    """Refuses to enqueue, as a device does that has failed."""

    error: Exception | None = None

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Event | None) -> Event:
        if self.error is not None:
            raise self.error
        return super().copy(destination, source, after=after)


@pytest.mark.parametrize("error", [CopyError("refused"), MemoryError("no staging")])
def test_copy_that_cannot_be_enqueued_leaves_the_table_whole_and_the_last_read_known(
    tmp_path: Path, error: Exception
) -> None:
    """Contract 2.5, 2.7: a refused copy frees the slot, and the next one into it awaits its last read."""
    runtime = RefusingRuntime()
    with open_store(tmp_path, num_slots=2, runtime=runtime) as tiny:
        tiny.serve([0, 1])
        runtime.error = error
        with pytest.raises(type(error)):
            tiny.serve([1, 5])
        assert tiny.residents() == {1}
        assert tiny.last.fills_failed == 1
        runtime.error = None
        tiny.serve([1, 5])  # the scripted runtime refuses it unless the read of expert 0 is awaited
        assert tiny.residents() == {1, 5}
        assert "0 held" in repr(tiny.arena)


class ForgetfulRuntime(ScriptedRuntime):
    """Loses the event that a copy must wait for."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Event | None) -> Event:
        return super().copy(destination, source, after=None)


def test_missing_wait_for_the_last_read_is_caught(tmp_path: Path) -> None:
    """Contract 2.5: overwriting a slot that a batch may still read, without its event, fails the test that does it."""
    with open_store(tmp_path, num_slots=2, runtime=ForgetfulRuntime()) as tiny:
        tiny.serve([0, 1])
        with pytest.raises(MissingWaitError, match="last read"):
            tiny.serve([2])


def test_every_copy_into_a_used_slot_waits_for_its_last_read(tmp_path: Path) -> None:
    """Contract 2.5: the scripted runtime accepts 300 random steps, so no wait is missing in any of them."""
    random = Random(7)
    with open_store(tmp_path, num_slots=3, policy="lrfu") as tiny:
        for _ in range(300):
            wanted = random.sample(range(8), random.randrange(1, 8))
            tiny.serve(wanted, recent=random.choice([None, wanted[:2]]), overlap=random.random() < 0.5)


def _compute_nothing(tiny: TinyStore, experts: Sequence[int], overlap: bool) -> None:
    with closing(iter(tiny.store.serve(0, experts, None, overlap=overlap))) as batches:
        for _ in batches:
            raise ZeroDivisionError


def _raise_while_computing(tiny: TinyStore, experts: Sequence[int], *, overlap: bool) -> None:
    with pytest.raises(ZeroDivisionError):
        _compute_nothing(tiny, experts, overlap)


@pytest.mark.parametrize("places", [None, 1])
@pytest.mark.parametrize("overlap", [True, False])
def test_exception_while_computing_releases_holds_and_keeps_what_was_filled(
    tmp_path: Path, runtime: Runtime, overlap: bool, places: int | None
) -> None:
    """Contract 1.4: a step that raises awaits its copies, holds nothing afterwards, and its fills stay resident."""
    with open_store(tmp_path, runtime=runtime, places=places) as tiny:
        tiny.serve([0, 1])
        _raise_while_computing(tiny, [0, 4, 1, 5], overlap=overlap)
        table = tiny.store.table(0)
        table.check_integrity()
        assert table.num_held == 0
        assert tiny.residents() == {0, 1, 4, 5}
        outcome = tiny.store.take_outcome()
        assert (outcome.hits, outcome.misses, outcome.fills, outcome.fills_failed) == (2, 2, 2, 0)
        assert "0 held" in repr(tiny.arena)
        tiny.serve([4, 5, 6, 7])
        assert tiny.last.hits == 2


def test_exception_while_computing_leaves_the_slots_read_events_known(tmp_path: Path) -> None:
    """Contract 1.4: what the failed batch enqueued may still read its slots; the next copy waits for it."""
    with open_store(tmp_path, num_slots=2) as tiny:
        _raise_while_computing(tiny, [0, 1], overlap=False)
        assert all(event is not None for event in tiny.store._layers[0].last_read)
        tiny.serve([2, 3])  # the scripted runtime refuses it unless both reads are awaited


def test_copy_that_fails_while_an_exception_unwinds_is_counted_and_loses_nothing(tmp_path: Path) -> None:
    """Contract 1.4, 2.7: the exception of the step is the one that is seen; the failed fill is counted."""
    runtime = ScriptedRuntime()
    with open_store(tmp_path, runtime=runtime) as tiny:
        tiny.serve([0, 1])
        _fail_expert(tiny, runtime, 5)
        _raise_while_computing(tiny, [0, 4, 5], overlap=True)
        outcome = tiny.store.take_outcome()
        assert (outcome.misses, outcome.fills, outcome.fills_failed) == (2, 1, 1)
        tiny.store.table(0).check_integrity()
        assert tiny.residents() == {0, 1, 4}
