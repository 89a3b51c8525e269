"""The runtime on a GPU: stream order, lifetimes, page-locking and what happens when it is refused."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from gpu import NUM_BYTES, await_that, block_of, runtime, spin_compute

from expertstream.kernels import cuda_modules
from expertstream.kernels import pinning as pinning_module
from expertstream.kernels.cuda import CudaRuntime
from expertstream.kernels.cuda_modules import load_cupy, spin
from expertstream.kernels.runtime import CopyError, Event

__all__ = ["runtime"]

pytestmark = pytest.mark.gpu


def test_copy_stream_is_non_blocking(runtime: CudaRuntime) -> None:
    """A blocking stream would wait for the default one, on which torch computes."""
    assert load_cupy().cuda.runtime.streamGetFlags(runtime.stream) == load_cupy().cuda.runtime.streamNonBlocking
    assert runtime.stream != torch.cuda.current_stream().cuda_stream


def test_copy_runs_beside_computing_and_the_host_waits_for_neither(runtime: CudaRuntime) -> None:
    """A copy without `after` ends while the compute stream is still busy."""
    source, target = block_of(runtime, 7), runtime.allocate_device(NUM_BYTES)
    pinning = runtime.start_registering(source)
    await_that(lambda: pinning.is_complete)
    spin_compute(0)
    torch.cuda.synchronize()
    spin_compute(500_000_000)
    busy = runtime.record_compute([target])
    copy = runtime.copy(target, source, after=None)
    await_that(copy.done)
    assert not busy.done()
    assert copy.copy_ns > 0
    busy.wait()
    await_that(busy.done)
    assert bool((target == 7).all())


def test_refilled_slot_keeps_what_its_readers_were_to_see(runtime: CudaRuntime) -> None:
    """Contract 2.5: a slot evicted and refilled with 0xFF at once gives its reader the old bytes, fifty times over."""
    good, poison = block_of(runtime, 3), block_of(runtime, 0xFF)
    for block in (good, poison):
        runtime.start_registering(block)
    await_that(lambda: bool(runtime.is_pinned))
    slot, last_read = runtime.allocate_device(NUM_BYTES), None
    for _ in range(50):
        runtime.copy(slot, good, after=last_read).wait()
        spin_compute(2_000_000)
        total = slot.long().sum()
        read = runtime.record_compute([slot])
        refilled = runtime.copy(slot, poison, after=read)
        refilled.wait()
        again = slot.long().sum()
        last_read = runtime.record_compute([slot])
        assert int(total) == 3 * NUM_BYTES
        assert int(again) == 0xFF * NUM_BYTES


def test_copies_of_pageable_memory_wait_for_the_last_read_too(runtime: CudaRuntime) -> None:
    """Memory that is not page-locked is copied in the same order."""
    slot = runtime.allocate_device(NUM_BYTES).fill_(3)
    spin_compute(20_000_000)
    total = slot.long().sum()
    copy = runtime.copy(slot, block_of(runtime, 9), after=runtime.record_compute([slot]))
    copy.wait()
    assert int(total) == 3 * NUM_BYTES
    assert int(slot.long().sum()) == 9 * NUM_BYTES
    assert not runtime.is_pinned


def test_host_memory_is_exactly_as_large_as_asked_for_and_page_aligned(runtime: CudaRuntime) -> None:
    """No rounding up: what is reserved is what the budget says."""
    for num_bytes in (0, 1, 4097, (3 << 20) + 64):
        block = runtime.allocate_host(num_bytes)
        assert block.numel() == block.untyped_storage().nbytes() == num_bytes
        assert num_bytes == 0 or block.data_ptr() % 4096 == 0
    with pytest.raises(MemoryError, match=str(1 << 60)):
        runtime.allocate_host(1 << 60)


def test_device_that_refuses_says_what_was_asked_and_what_is_free(runtime: CudaRuntime) -> None:
    """Out of memory is a MemoryError with asked, free and total bytes."""
    with pytest.raises(MemoryError, match=rf"Cannot allocate {1 << 50} bytes on cuda:0: \d+ of \d+ bytes are free"):
        runtime.allocate_device(1 << 50)
    assert runtime.free_device_bytes > 0


def test_registration_pins_and_a_copy_across_chunks_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies cross the places where two registrations meet, also while only one of them is done."""
    real = pinning_module.Pinning

    def small_chunks(*args: Any, **options: Any) -> pinning_module.Pinning:
        return real(*args, **options, chunk_bytes=1 << 16)

    monkeypatch.setattr("expertstream.kernels.cuda.Pinning", small_chunks)
    runtime = CudaRuntime(0)
    block = torch.randint(0, 256, (NUM_BYTES + 4096,), dtype=torch.uint8)
    source = runtime.allocate_host(block.numel()).copy_(block)
    pinning = runtime.start_registering(source, follows=True)
    pinning.note_progress(3, 8)
    await_that(lambda: pinning.num_bytes >= NUM_BYTES // 4)
    for _ in range(2):
        target = runtime.allocate_device(NUM_BYTES)
        runtime.copy(target, source[1000 : 1000 + NUM_BYTES], after=None).wait()
        assert torch.equal(target.cpu(), block[1000 : 1000 + NUM_BYTES])
        pinning.note_progress(1, 1)
        await_that(lambda: runtime.is_pinned)
    runtime.close()


def test_memory_that_cannot_be_registered_is_copied_right_all_the_same(runtime: CudaRuntime) -> None:
    """A refusal of the driver is one reason, leaves no error behind, and costs speed only."""
    api = load_cupy().cuda.runtime
    reasons: list[str] = []
    source, target = block_of(runtime, 6), runtime.allocate_device(NUM_BYTES)
    api.hostRegister(source.data_ptr(), 4096, 0)  # so that registering it again is refused
    pinning = runtime.start_registering(source, reasons.append)
    await_that(lambda: bool(reasons))
    assert pinning.failure == reasons[0]
    assert f"{NUM_BYTES} of {NUM_BYTES} bytes of host memory stay pageable" in reasons[0]
    assert not runtime.is_pinned
    api.hostUnregister(source.data_ptr())
    runtime.copy(target, source, after=None).wait()
    assert bool((target == 6).all())
    torch.cuda.synchronize()  # a latched error would surface here


def test_closing_unregisters_so_that_memory_may_be_registered_again() -> None:
    """Close waits for copies, unregisters, may be repeated, and then refuses copies."""
    runtime = CudaRuntime(0)
    source, target = block_of(runtime, 8), runtime.allocate_device(NUM_BYTES)
    runtime.start_registering(source)
    await_that(lambda: runtime.is_pinned)
    spin(50_000_000, 0, runtime.stream)
    copy = runtime.copy(target, source, after=None)
    runtime.close()
    assert copy.done()
    assert bool((target == 8).all())
    runtime.close()
    with pytest.raises(CopyError, match="the runtime is closed"):
        runtime.copy(target, source, after=None)
    api = load_cupy().cuda.runtime
    api.hostRegister(source.data_ptr(), NUM_BYTES, 0)
    api.hostUnregister(source.data_ptr())


def test_close_at_interpreter_shutdown_does_nothing(runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late finaliser must not touch a driver that is going away."""
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    runtime.close()
    monkeypatch.undo()
    target = runtime.allocate_device(NUM_BYTES)
    runtime.copy(target, block_of(runtime, 2), after=None).wait()
    assert bool((target == 2).all())


def test_refused_copy_raises_with_the_bytes_and_the_next_one_works(
    runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA error is translated once, keeps its cause, and leaves the runtime usable."""
    source, target = block_of(runtime, 2), runtime.allocate_device(NUM_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr("expertstream.kernels.cuda._HOST_TO_DEVICE", 99)
        with pytest.raises(CopyError, match=f"Cannot copy {NUM_BYTES} bytes to cuda:0") as caught:
            runtime.copy(target, source, after=None)
    assert isinstance(caught.value.__cause__, cuda_modules.cuda_error())
    runtime.copy(target, source, after=None).wait()
    assert bool((target == 2).all())


def test_throttle_slows_copies(runtime: CudaRuntime) -> None:
    """The test switch holds a copy to its rate on the device, and the host goes on."""
    slow = CudaRuntime(0, throttle_bytes_per_s=NUM_BYTES * 20.0)
    copy = slow.copy(slow.allocate_device(NUM_BYTES), block_of(slow, 1), after=None)
    assert not copy.done()
    await_that(copy.done)
    assert copy.copy_ns > 49_000_000
    slow.close()


def test_copy_from_another_thread_sets_its_device(runtime: CudaRuntime) -> None:
    """Every entry makes its device current, whichever thread calls."""
    source, target = block_of(runtime, 5), runtime.allocate_device(NUM_BYTES)
    events: list[Event] = []
    thread = threading.Thread(target=lambda: events.append(runtime.copy(target, source, after=None)))
    thread.start()
    thread.join()
    events[0].wait()
    assert bool((target == 5).all())
