"""A runtime for tests: a copy ends when the script says so, evicted memory is poisoned, a missing wait is a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .runtime import CopyError, Event

__all__ = ["MissingWaitError", "ScriptedCopy", "ScriptedRuntime"]

POISON = 0xFF
"""A record of 0xFF bytes is NaN in every floating dtype: whatever reads it shows."""


class MissingWaitError(AssertionError):
    """Raised when a slot was overwritten while work that reads it was not awaited."""


class ScriptedCopy:
    """A copy that has started (its destination is poison) and ends when the script lets it."""

    def __init__(self, runtime: ScriptedRuntime, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._runtime, self._destination, self._source = runtime, destination, source
        self._is_done = False
        self.error: BaseException | None = None
        self.copy_ns = self.stall_ns = 0

    def done(self) -> bool:
        return self._is_done

    def finish(self) -> None:
        """End the copy: its bytes are readable from here on."""
        if not self._is_done:
            self._destination.copy_(self._source)
            self.copy_ns, self._is_done = 1, True

    def fail(self, error: BaseException) -> None:
        """End the copy without its bytes; waiting for it raises `CopyError` from `error`."""
        self.error, self._is_done = error, True

    def wait(self) -> None:
        if not self._is_done:
            self.stall_ns = 1
            self._runtime.on_wait(self)
        if not self._is_done:
            raise MissingWaitError("The script left a copy unfinished that the code waits for: this would hang.")
        if self.error is not None:
            raise CopyError(f"Cannot copy {self._source.numel()} bytes: {self.error}") from self.error


class _ComputeEvent:
    copy_ns = 0
    stall_ns = 0

    def __init__(self) -> None:
        self.is_awaited = False

    def done(self) -> bool:
        return self.is_awaited

    def wait(self) -> None:
        self.is_awaited = True


class ScriptedRuntime:
    """Runs on host memory, in the calling thread. The default script ends a copy when it is waited for.

    Args:
        on_wait: Called with a copy that is waited for while unfinished; ends it with `finish()` or `fail()`.
    """

    is_pinned = False

    def __init__(self, *, on_wait: Callable[[ScriptedCopy], None] = ScriptedCopy.finish) -> None:
        self.device = torch.device("cpu")
        self.on_wait = on_wait
        self.copies: list[ScriptedCopy] = []
        self._readers: dict[int, _ComputeEvent] = {}
        self.is_closed = False

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def allocate_device(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, *, after: Event | None) -> Event:
        reader = self._readers.pop(destination.data_ptr(), None)
        if reader is not None and after is not reader:
            raise MissingWaitError("A slot is overwritten without waiting for the last read of it.")
        if after is not None:
            after.wait()
        destination.fill_(POISON)
        copy = ScriptedCopy(self, destination, source)
        self.copies.append(copy)
        return copy

    def record_compute(self, reads: Sequence[torch.Tensor]) -> Event:
        event = _ComputeEvent()
        self._readers.update((slot.data_ptr(), event) for slot in reads)
        return event

    def drain(self) -> None:
        """Nothing to wait for: computing is synchronous."""

    def close(self) -> None:
        self.is_closed = True

    def __repr__(self) -> str:
        pending = sum(not copy.done() for copy in self.copies)
        return f"<ScriptedRuntime {len(self.copies)} copies: {pending} pending>"
