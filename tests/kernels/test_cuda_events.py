"""Events of a GPU: what waits for what, what is kept for how long, and what the marks measure."""

from __future__ import annotations

import pytest
import torch
from gpu import NUM_BYTES, await_that, block_of, runtime

from expertstream.kernels.cuda import CudaRuntime
from expertstream.kernels.cuda_events import CopyEvent
from expertstream.kernels.cuda_modules import spin

__all__ = ["runtime"]

pytestmark = pytest.mark.gpu


def test_wait_lets_the_compute_stream_wait_and_not_the_host(runtime: CudaRuntime) -> None:
    """What is computed after `wait` sees the copy; the call itself returns while the copy is held up."""
    source, target = block_of(runtime, 5), runtime.allocate_device(NUM_BYTES).fill_(1)
    pinning = runtime.start_registering(source)
    await_that(lambda: pinning.is_complete)
    target.long().sum()  # the first use of a kernel or a size may wait for the device
    runtime.copy(target, source, after=None).wait()
    target.fill_(1)
    spin(0, 0, runtime.stream)
    torch.cuda.synchronize()
    spin(200_000_000, 0, runtime.stream)
    copy = runtime.copy(target, source, after=None)
    copy.wait()
    total = target.long().sum()
    assert not copy.done()
    assert int(total) == 5 * NUM_BYTES
    await_that(copy.done)
    assert copy.stall_ns > 50_000_000
    assert 0 < copy.copy_ns < 50_000_000


def test_source_is_kept_until_its_copy_is_done(runtime: CudaRuntime) -> None:
    """Whoever drops the source after the call loses nothing: the event keeps it, and lets go when done."""
    source, target = block_of(runtime, 4), runtime.allocate_device(NUM_BYTES)
    copy = runtime.copy(target, source, after=None)
    assert isinstance(copy, CopyEvent)
    assert any(kept is source for kept in copy._keeps)
    await_that(copy.done)
    assert copy._keeps == ()


def test_marks_are_used_again_and_an_old_event_stays_done(runtime: CudaRuntime) -> None:
    """Events of a copy that is done are recycled; asking the old copy again changes nothing."""
    source, target = block_of(runtime, 1), runtime.allocate_device(NUM_BYTES)
    first = runtime.copy(target, source, after=None)
    await_that(first.done)
    took = first.copy_ns
    spin(100_000_000, 0, runtime.stream)
    second = runtime.copy(target, source, after=None)
    assert first.done()
    assert first.copy_ns == took
    first.wait()
    await_that(second.done)
