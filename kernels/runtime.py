"""The one seam to a device: allocate, copy on the copy stream, record and await events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch is imported by the implementations, never by this definition
    import torch

__all__ = ["ALIGNMENT", "CopyError", "Event", "Runtime"]

ALIGNMENT = 64
"""Bytes. Every record and every part of one starts on this boundary, in host memory as in a slot, so that a product
reads the same alignment wherever an expert lies and its bits do not depend on residency."""


class CopyError(Exception):
    """Raised when a host-to-device copy failed; the destination's content is undefined and must not be used."""


class Event(Protocol):
    """A point on a stream. For a copy, the point at which its bytes are readable on the device."""

    @property
    def copy_ns(self) -> int:
        """Nanoseconds the copy stream spent on the copy this event follows; 0 until done, 0 for a compute event."""

    @property
    def stall_ns(self) -> int:
        """Nanoseconds for which `wait` held up computing; 0 until done, 0 for a compute event."""

    def done(self) -> bool:
        """Whether the stream has passed this point (also true when the copy failed). Never blocks."""

    def wait(self) -> None:
        """Let nothing that this thread computes from here on begin before the stream has passed this point.

        Where computing is asynchronous the compute stream waits and this returns at once; else this thread waits. So
        what the copy read from may only be let go when the event is `done`.

        Raises:
            CopyError: When the copy this event follows is known to have failed.
        """


class Runtime(Protocol):
    """Everything that touches a device goes through here. One per engine; used by its step thread."""

    @property
    def device(self) -> torch.device:
        """The device whose memory holds the slots."""

    @property
    def is_pinned(self) -> bool:
        """Whether host blocks of this runtime are page-locked. False where there is no device to lock them for."""

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of host memory, aligned to `ALIGNMENT`, not yet touched.

        Raises:
            MemoryError: When the host refuses; the message has the bytes asked for.
        """

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] of device memory, aligned to `ALIGNMENT`.

        Raises:
            MemoryError: When the device refuses; the message has the bytes asked for.
        """

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Event | None) -> Event:
        """Enqueue one host-to-device copy.

        Args:
            destination: uint8 [n], device.
            source: uint8 [n], host; must stay unchanged until the returned event is done.
            after: The last read of `destination`; the copy starts no earlier. None when nothing reads it.

        Returns:
            The event after which `destination` holds `source`.

        Stream:
            Enqueued on the copy stream, in call order. The caller's thread does not wait.
        """

    def record_compute(self, reads: Sequence[torch.Tensor]) -> Event:
        """Return an event on the compute stream: all work enqueued so far by this thread has finished when it is done.

        Args:
            reads: The slots that this work reads. A runtime that checks ordering remembers them; others need not look.
        """

    def drain(self) -> None:
        """Block this thread until the device has done what this thread enqueued: a step ends when its work has."""

    def close(self) -> None:
        """Wait for enqueued copies, then release threads and streams. Idempotent."""
