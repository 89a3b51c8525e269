"""What tests on a GPU share: an open runtime, filled host memory, a busy stream, and a patient question."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from expertstream.kernels.cuda_modules import spin

if TYPE_CHECKING:
    from expertstream.kernels.cuda import CudaRuntime

NUM_BYTES = 1 << 20
WAIT_S = 20.0


@pytest.fixture
def runtime() -> Iterator[CudaRuntime]:
    """An open runtime on device 0."""
    from expertstream.kernels.cuda import CudaRuntime

    opened = CudaRuntime(0)
    yield opened
    torch.cuda.synchronize()
    opened.close()


def await_that(condition: Callable[[], bool]) -> None:
    """Asks until it is so: events of a device are learned of by asking, and it is quick."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "the device did not get there"


def block_of(runtime: CudaRuntime, value: int, num_bytes: int = NUM_BYTES) -> torch.Tensor:
    """Allocates host memory and fills it."""
    return runtime.allocate_host(num_bytes).fill_(value)


def spin_compute(ns: int) -> None:
    """Keeps torch's current stream busy."""
    spin(ns, 0, torch.cuda.current_stream().cuda_stream)
