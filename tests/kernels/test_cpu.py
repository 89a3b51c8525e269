"""The runtime without a GPU: copies run in order on a thread of their own, and their events are real."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from expertstream.kernels.cpu import CpuRuntime
from expertstream.kernels.runtime import ALIGNMENT, CopyError, Event

WAIT_S = 20.0


class Gate:
    """An event of a compute stream that passes when the test says so."""

    copy_ns = 0
    stall_ns = 0

    def __init__(self) -> None:
        self._passed = threading.Event()

    def done(self) -> bool:
        return self._passed.is_set()

    def wait(self) -> None:
        assert self._passed.wait(WAIT_S), "the test never opened the gate"

    def open(self) -> None:
        self._passed.set()


def _bytes(value: int, size: int = 256) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_copy_after_wait_has_the_bytes_of_the_source() -> None:
    """An event that was awaited makes its copy readable, and says how long the copy took."""
    runtime = CpuRuntime()
    target = runtime.allocate_device(256)
    event = runtime.copy(target, _bytes(7), after=None)
    event.wait()
    assert event.done()
    assert event.copy_ns > 0
    assert torch.equal(target, _bytes(7))
    runtime.close()


def test_copy_runs_beside_the_caller_and_not_before_the_last_read() -> None:
    """Contract 2.5: a slot is not overwritten before the event of its last read has passed; the caller goes on."""
    runtime, gate = CpuRuntime(), Gate()
    target = _bytes(1)
    event = runtime.copy(target, _bytes(2), after=gate)
    assert not event.done()
    assert torch.equal(target, _bytes(1))
    gate.open()
    event.wait()
    assert torch.equal(target, _bytes(2))
    runtime.close()


def test_copies_end_in_the_order_they_were_enqueued() -> None:
    """The copy stream is ordered: a copy behind one that waits has not started either."""
    runtime, gate = CpuRuntime(), Gate()
    target = _bytes(0)
    first = runtime.copy(target, _bytes(1), after=gate)
    second = runtime.copy(target, _bytes(2), after=None)
    assert not second.done()
    gate.open()
    second.wait()
    assert first.done()
    assert torch.equal(target, _bytes(2))
    runtime.close()


def test_copy_that_fails_raises_on_wait_and_the_next_copy_works() -> None:
    """A copy's error reaches whoever waits for it, as CopyError with the bytes and the cause, and nobody else."""
    runtime = CpuRuntime()
    target = _bytes(0, 100)
    failed, good = runtime.copy(target, _bytes(1, 99), after=None), runtime.copy(target, _bytes(2, 100), after=None)
    with pytest.raises(CopyError, match="Cannot copy 99 bytes") as caught:
        failed.wait()
    assert isinstance(caught.value.__cause__, ValueError)
    assert failed.done()
    good.wait()
    assert torch.equal(target, _bytes(2, 100))
    runtime.close()


def test_close_waits_for_enqueued_copies_and_then_refuses_more() -> None:
    """Closing ends what was enqueued, ends the thread, may be repeated, and a later copy is refused."""
    runtime, gate = CpuRuntime(), Gate()
    target = _bytes(0)
    event = runtime.copy(target, _bytes(3), after=gate)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    assert not event.done()
    gate.open()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert event.done()
    assert torch.equal(target, _bytes(3))
    runtime.close()
    with pytest.raises(CopyError, match="closed"):
        runtime.copy(target, _bytes(4), after=None)
    assert repr(runtime) == "<CpuRuntime closed>"


def test_runtime_without_a_copy_has_no_thread() -> None:
    """Opening a runtime starts nothing."""
    before = threading.active_count()
    runtime = CpuRuntime()
    assert threading.active_count() == before
    runtime.close()


def test_finished_copy_keeps_no_tensor_alive() -> None:
    """A finished copy's memory is free again while the copy thread waits for the next one."""
    runtime = CpuRuntime()
    source = _bytes(5)
    is_gone = threading.Event()
    weakref.finalize(source, is_gone.set)
    runtime.copy(torch.empty_like(source), source, after=None).wait()
    del source
    assert is_gone.wait(WAIT_S)
    runtime.close()


def test_compute_event_has_passed_because_computing_is_synchronous() -> None:
    """On the CPU work that was enqueued has been done."""
    event: Event = CpuRuntime().record_compute([_bytes(0)])
    event.wait()
    assert event.done()
    assert event.copy_ns == 0


@pytest.mark.parametrize("size", [1, 63, 4096])
def test_allocations_are_aligned_and_exact(size: int) -> None:
    """Host and device blocks have the size asked for and start on the alignment of records."""
    runtime = CpuRuntime()
    for block in (runtime.allocate_host(size), runtime.allocate_device(size)):
        assert block.shape == (size,)
        assert block.dtype == torch.uint8
        assert block.data_ptr() % ALIGNMENT == 0
    assert not runtime.is_pinned


def test_allocation_that_is_refused_is_a_memory_error_with_the_size() -> None:
    """An allocation that the host refuses says how many bytes were asked for."""
    with pytest.raises(MemoryError, match=str(1 << 60)):
        CpuRuntime().allocate_host(1 << 60)
    with pytest.raises(MemoryError, match="slot"):
        CpuRuntime().allocate_device(1 << 60)


def test_throttle_makes_a_copy_take_at_least_its_time_at_that_rate() -> None:
    """Contract 3.4: the throttled link slows copies to at most its rate."""
    runtime = CpuRuntime(throttle_bytes_per_s=20_000)
    event = runtime.copy(_bytes(0, 200), _bytes(1, 200), after=None)
    event.wait()
    assert event.copy_ns >= 10_000_000
    runtime.close()
