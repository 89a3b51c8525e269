"""Points on CUDA streams: the last read of a slot, and the end of a copy with the time it took."""

from __future__ import annotations

from typing import Any

import torch

from .cuda_modules import cuda_error, load_cupy
from .runtime import CopyError, Event

__all__ = ["ComputeEvent", "CopyEvent", "Events"]

_NOT_READY = 600


class Events:
    """Makes, records and asks CUDA events of one device. Not for several threads at once.

    Args:
        device: The device; it must be current in the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.error = cuda_error()
        self.api = load_cupy().cuda.runtime
        self._new = load_cupy().cuda.Event
        self._free: list[Any] = []

    @property
    def compute_stream(self) -> int:
        """Handle of torch's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def record(self, stream: int, *, is_timed: bool) -> Any:
        """Record an event on a stream. Timed ones are used again once given back; the others end with their owner."""
        event = (self._free.pop() if self._free else self._new()) if is_timed else self._new(disable_timing=True)
        self.api.eventRecord(event.ptr, stream)
        return event

    def give_back(self, *events: Any) -> None:
        """Take timed events back that nobody asks any more."""
        self._free += events

    def has_passed(self, event: Any) -> bool:
        """Whether the stream has passed the event. Raises what CuPy raises when the device has failed."""
        status = self.api.eventQuery(event.ptr)
        if status == _NOT_READY:
            return False
        if status:
            raise self.error(status)
        return True

    def elapsed_ns(self, begin: Any, end: Any) -> int:
        """Return the device's nanoseconds between two timed events that have passed."""
        return int(self.api.eventElapsedTime(begin.ptr, end.ptr) * 1e6)

    def let_wait(self, stream: int, event: Event) -> None:
        """Let a stream wait for an event; this thread waits only for one that is on no stream."""
        if not isinstance(event, ComputeEvent | CopyEvent):
            event.wait()
        elif not event.done():
            self.api.streamWaitEvent(stream, event.handle)


class ComputeEvent:
    """A point on the compute stream.

    Args:
        events: Of the device.
    """

    __slots__ = ("_event", "_events")
    copy_ns = 0
    stall_ns = 0

    def __init__(self, events: Events) -> None:
        self._events = events
        self._event = events.record(events.compute_stream, is_timed=False)

    @property
    def handle(self) -> int:
        """Of the CUDA event."""
        return int(self._event.ptr)

    def done(self) -> bool:
        """Whether the stream has passed this point, or will never do so as the device has failed."""
        try:
            return self._events.has_passed(self._event)
        except self._events.error:  # the next call that needs the device says so
            return True

    def wait(self) -> None:
        """Make torch's current stream wait."""
        self._events.let_wait(self._events.compute_stream, self)


class CopyEvent:
    """The end of a copy. Its marks time the copy, and how long the compute stream stood still for it.

    Args:
        events: Of the device.
        begin: Timed, recorded before the copy.
        end: Timed, recorded after it.
        keeps: What must live until the copy is done.
    """

    __slots__ = ("_begin", "_end", "_events", "_failure", "_is_done", "_keeps", "_stall", "copy_ns", "stall_ns")

    def __init__(self, events: Events, begin: Any, end: Any, keeps: tuple[torch.Tensor, ...]) -> None:
        self._events, self._begin, self._end, self._keeps = events, begin, end, keeps
        self._stall: tuple[Any, Any] | None = None
        self._failure: Exception | None = None
        self._is_done = False
        self.copy_ns = self.stall_ns = 0

    @property
    def handle(self) -> int:
        """Of the CUDA event at the end; of use until the copy is done."""
        return int(self._end.ptr)

    def done(self) -> bool:
        """Whether the copy has ended and, where the compute stream was made to wait for it, has gone on since."""
        if self._is_done:
            return True
        events, stall = self._events, self._stall
        try:
            if not events.has_passed(self._end) or (stall is not None and not events.has_passed(stall[1])):
                return False
            self.copy_ns = events.elapsed_ns(self._begin, self._end)
            if stall is not None:
                self.stall_ns = events.elapsed_ns(*stall)
        except events.error as exc:
            self._failure = exc
        events.give_back(self._begin, self._end, *(stall or ()))
        self._is_done, self._keeps, self._stall = True, (), None
        return True

    def wait(self) -> None:
        """Make torch's current stream wait for the copy; this thread goes on at once.

        Raises:
            CopyError: When the copy is known to have failed.
        """
        events = self._events
        if not self.done():
            stream = events.compute_stream
            try:
                if self._stall is not None:
                    events.api.streamWaitEvent(stream, self._end.ptr)
                    return
                before = events.record(stream, is_timed=True)
                events.api.streamWaitEvent(stream, self._end.ptr)
                self._stall = before, events.record(stream, is_timed=True)
            except events.error as exc:
                raise CopyError(f"Cannot wait for a copy to {events.device}: {exc}") from exc
        if self._failure is not None:
            raise CopyError(f"A copy to {events.device} failed: {self._failure}") from self._failure
