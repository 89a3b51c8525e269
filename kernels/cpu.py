"""The runtime where there is no GPU: an ordered worker thread is the copy stream, and its events are real."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .runtime import CopyError, Event

__all__ = ["CpuRuntime"]


@dataclass(slots=True)
class _Done:
    """An event of the compute stream: computing is synchronous here, so whatever was enqueued has finished."""

    copy_ns: int = 0
    stall_ns: int = 0

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_DONE = _Done()


@dataclass(slots=True)
class _Copy:
    destination: torch.Tensor
    source: torch.Tensor
    after: Event | None
    passed: threading.Event = field(default_factory=threading.Event)
    copy_ns: int = 0
    stall_ns: int = 0
    error: BaseException | None = None

    def done(self) -> bool:
        return self.passed.is_set()

    def wait(self) -> None:
        started = time.perf_counter_ns()
        self.passed.wait()
        self.stall_ns += time.perf_counter_ns() - started
        if self.error is not None:
            where = f"{self.source.numel()} bytes to {self.destination.device}"
            raise CopyError(f"Cannot copy {where}: {self.error}") from self.error

    def run(self, bytes_per_s: float) -> None:
        try:
            if self.after is not None:
                self.after.wait()
            started = time.perf_counter_ns()
            num_bytes = self.destination.numel()
            if num_bytes != self.source.numel() or not (
                self.destination.is_contiguous() and self.source.is_contiguous()
            ):
                raise ValueError(f"source has {self.source.numel()} bytes, destination {num_bytes}, each in one run")
            # Not torch's copy: its threads would take the cores that the computing thread's are running on.
            ctypes.memmove(self.destination.data_ptr(), self.source.data_ptr(), num_bytes)
            if bytes_per_s:
                time.sleep(self.source.numel() / bytes_per_s)
            self.copy_ns = time.perf_counter_ns() - started
        except Exception as exc:  # delivered to whoever waits for the event
            self.error = exc
        finally:
            self.passed.set()


class CpuRuntime:
    """Host memory on both sides; copies run in order on a thread of their own, beside the computing thread.

    Args:
        throttle_bytes_per_s: A test switch: slows every copy to at most this rate. 0 is off.
    """

    is_pinned = False

    def __init__(self, *, throttle_bytes_per_s: float = 0.0) -> None:
        self.device = torch.device("cpu")
        self._throttle = throttle_bytes_per_s
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return _allocate(num_bytes, "host")

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        return _allocate(num_bytes, "slot")

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Event | None) -> Event:
        if self._is_closed:
            raise CopyError("Cannot copy: the runtime is closed.")
        copy = _Copy(destination, source, after)
        if self._thread is None:
            # Daemonic: a host that never closes its engine must still be able to exit.
            self._thread = threading.Thread(target=self._run, name="expertstream-copy", daemon=True)
            self._thread.start()
        self._queue.put(copy)
        return copy

    def record_compute(self, reads: Sequence[torch.Tensor]) -> Event:
        return _DONE

    def drain(self) -> None:
        """Nothing to wait for: computing is synchronous."""

    def close(self) -> None:
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        take: Callable[[], _Copy | None] = self._queue.get
        while (copy := take()) is not None:
            copy.run(self._throttle)
            del copy  # a finished copy must not keep its tensors alive while the thread waits for the next

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "idle" if self._queue.empty() else "copying"
        return f"<CpuRuntime {state}>"


def _allocate(num_bytes: int, what: str) -> torch.Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8)
    except RuntimeError as exc:
        raise MemoryError(f"Cannot allocate {num_bytes} bytes of {what} memory.") from exc
