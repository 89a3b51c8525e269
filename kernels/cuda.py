"""The runtime on an NVIDIA GPU: CuPy's streams, events and registered host memory beside torch's tensors.

The host never waits for a copy. The copy stream waits for the last read of a slot, the compute stream waits for the
copies it needs, and what became of a copy is learned by asking, later.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from .cuda_events import ComputeEvent, CopyEvent, Events
from .cuda_modules import load_cupy, spin
from .pinning import Pinning
from .runtime import CopyError, Event

__all__ = ["CudaRuntime"]

_HOST_TO_DEVICE = 1
_UNLOADING = 4  # the driver is going away with the process, and takes registrations along
_PORTABLE_MAPPED = 3  # registered for every context, and readable by kernels


class CudaRuntime:
    """One device and one copy stream. Used by one thread; pinning has a thread of its own.

    Args:
        device_index: CUDA device number.
        throttle_bytes_per_s: A test switch: slows every copy to at most this rate. 0 is off.

    Raises:
        RuntimeError: When CuPy is missing, broken or finds no device; the message names the extra to install.
    """

    def __init__(self, device_index: int = 0, *, throttle_bytes_per_s: float = 0.0) -> None:
        self._cupy = load_cupy()
        self._api = self._cupy.cuda.runtime
        self.device = torch.device("cuda", device_index)
        self._throttle = throttle_bytes_per_s
        self._enter()
        # A blocking stream would wait for whatever runs on the default one, which is where torch computes.
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._events = Events(self.device)
        self._in_flight: deque[CopyEvent] = deque()
        self._pinnings: list[Pinning] = []
        self._is_closed = False

    @property
    def is_pinned(self) -> bool:
        """Whether all host memory that was to be page-locked is."""
        return bool(self._pinnings) and all(pinning.is_complete for pinning in self._pinnings)

    @property
    def stream(self) -> int:
        """Handle of the copy stream."""
        handle: int = self._stream.ptr
        return handle

    @property
    def free_device_bytes(self) -> int:
        """Bytes that can still be allocated: free on the device, or kept by torch without a use."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of ordinary memory, page-aligned, exactly as large as asked for.

        It is pageable until `start_registering` has got to it: whoever fills it touches it first, which is faster than
        having the driver touch it (measured: 0.04 s per GiB to register touched memory, 0.66 s to allocate it pinned).

        Raises:
            MemoryError: When the host refuses; the message has the bytes asked for.
        """
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            block = _map_anonymous(num_bytes)
        except (OSError, OverflowError, ValueError) as exc:
            raise MemoryError(f"Cannot allocate {num_bytes} bytes of host memory: {exc}") from exc
        return torch.frombuffer(block, dtype=torch.uint8)

    def start_registering(
        self, block: torch.Tensor, on_failure: Callable[[str], None] | None = None, *, follows: bool = False
    ) -> Pinning:
        """Start to page-lock a block of `allocate_host` on a thread of its own, while others fill it and copy from it.

        Args:
            block: uint8 [n], host; kept until `close`.
            on_failure: Called once on that thread with the reason when the host or the driver refuses. What is not
                page-locked stays pageable, `is_pinned` stays false, and copies stay right.
            follows: Wait for the returned object's `note_progress` before touching a chunk.

        Returns:
            The registration; `note_progress` and `failure` are of interest.
        """
        pinning = Pinning(block, self._register, self._api.hostUnregister, on_failure=on_failure, follows=follows)
        self._pinnings.append(pinning)
        pinning.start()
        return pinning

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of device memory.

        Raises:
            MemoryError: When the device refuses; the message has the bytes asked for, free and in total.
        """
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as exc:
            free, total = torch.cuda.mem_get_info(self.device)
            message = f"Cannot allocate {num_bytes} bytes on {self.device}: {free} of {total} bytes are free."
            raise MemoryError(message) from exc

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Event | None) -> Event:
        """Enqueue one host-to-device copy.

        Returns:
            An event whose `wait` makes torch's current stream wait, never the host; it keeps `source` alive until done.

        Raises:
            CopyError: When CUDA refuses the copy.

        Stream:
            Enqueued on the copy stream, which first waits for `after`. From memory that is not page-locked (yet) CUDA
            stages the copy while the caller waits.
        """
        if self._is_closed:
            raise CopyError("Cannot copy: the runtime is closed.")
        num_bytes = source.numel()
        if destination.numel() != num_bytes:
            raise ValueError(f"source has {num_bytes} bytes, destination {destination.numel()}")
        self._enter()
        self._prune()
        try:
            if after is not None:
                self._events.let_wait(self.stream, after)
            begin = self._events.record(self.stream, is_timed=True)
            target = destination.data_ptr()
            for address, size in self._pieces(source.data_ptr(), num_bytes):
                self._api.memcpyAsync(target, address, size, _HOST_TO_DEVICE, self.stream)
                target += size
            if self._throttle:
                spin(int(num_bytes / self._throttle * 1e9), self.device.index, self.stream)
            end = self._events.record(self.stream, is_timed=True)
        except self._events.error as exc:
            with contextlib.suppress(self._events.error):  # a piece may be on its way, and the caller lets go of it now
                self._stream.synchronize()
            raise CopyError(f"Cannot copy {num_bytes} bytes to {self.device}: {exc}") from exc
        event = CopyEvent(self._events, begin, end, (destination, source))
        self._in_flight.append(event)
        return event

    def record_compute(self, reads: Sequence[torch.Tensor]) -> Event:
        """Return an event on torch's current stream of the device."""
        self._enter()
        return ComputeEvent(self._events)

    def drain(self) -> None:
        """Block this thread until the compute stream has done all that was enqueued on it."""
        torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Wait for the copy stream, unregister host memory. Idempotent; does nothing while the interpreter ends."""
        if self._is_closed or sys.is_finalizing():
            return
        self._is_closed = True
        self._enter()
        with ExitStack() as stack:
            stack.callback(self._in_flight.clear)
            for pinning in self._pinnings:
                stack.callback(self._close_pinning, pinning)
            self._stream.synchronize()

    def _close_pinning(self, pinning: Pinning) -> None:
        try:
            pinning.close()
        except self._events.error as exc:
            if getattr(exc, "status", None) != _UNLOADING:
                raise RuntimeError(f"Cannot unregister host memory: {exc}") from exc

    def _enter(self) -> None:
        """Make the device current: every thread starts with device 0."""
        self._api.setDevice(self.device.index)

    def _register(self, address: int, num_bytes: int) -> None:
        self._enter()
        # When it raises CuPy has cleared its latched error; torch has a CUDA runtime, and a latch, of its own.
        self._api.hostRegister(address, num_bytes, _PORTABLE_MAPPED)

    def _pieces(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        for pinning in self._pinnings:
            if pinning.begin <= address < pinning.end:
                return pinning.pieces(address, num_bytes)
        return [(address, num_bytes)]

    def _prune(self) -> None:
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._in_flight)} copies in flight"
        return f"<CudaRuntime {self.device}: {state}, host memory {'pinned' if self.is_pinned else 'pageable'}>"


def _map_anonymous(num_bytes: int) -> mmap.mmap:
    if not (hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")):
        return mmap.mmap(-1, num_bytes)
    block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve
            block.madvise(mmap.MADV_HUGEPAGE)
    return block
