"""Page-locks a block of host memory in chunks, on a thread of its own, while others fill it and copy from it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["CHUNK_BYTES", "Pinning"]

CHUNK_BYTES = 1 << 30
"""Registering a GiB that was touched before takes about 0.04 s: that long a closing engine waits at most."""

STALLED_S = 2.0
"""Without progress for so long the filling has ended early or waits for something: the rest is registered as it is."""


_OPEN: set[Pinning] = set()
"""Registrations not closed. A block that is freed while registered would leave its address to other memory, of which
copies would then read the old pages: so a runtime that nobody closes keeps its block to the end of the process."""


class Pinning:
    """The registration of one block. A failure leaves the rest of the block pageable: slower, never wrong.

    Args:
        block: uint8 [n], host.
        register: Page-locks (address, bytes); raises when it cannot. Called on the thread.
        unregister: Undoes it, given the address.
        on_failure: Called once, on the thread, with the reason; must not raise.
        follows: Chunks wait for `note_progress`, so that filling the block is what touches its pages: registering
            untouched memory takes five times longer.
        chunk_bytes: Bytes per call; a multiple of the page size.
    """

    def __init__(
        self,
        block: torch.Tensor,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        *,
        on_failure: Callable[[str], None] | None = None,
        follows: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._block = block
        self._register, self._unregister, self._on_failure = register, unregister, on_failure
        self.begin, self.end, self.chunk_bytes = block.data_ptr(), block.data_ptr() + block.numel(), chunk_bytes
        self.failure: str | None = None
        self._pinned: list[int] = []
        self._changed = threading.Condition()
        self._share = 0.0 if follows else 1.0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="expertstream-pinning", daemon=True)

    def start(self) -> None:
        """Start the thread. Returns at once."""
        _OPEN.add(self)
        self._thread.start()

    def note_progress(self, done: int, total: int) -> None:
        """Say how much of the block is filled, from the front; from any thread."""
        with self._changed:
            self._share = max(self._share, done / total if total else 1.0)
            self._changed.notify_all()

    @property
    def num_bytes(self) -> int:
        """Bytes that are page-locked."""
        return min(len(self._pinned) * self.chunk_bytes, self.end - self.begin)

    @property
    def is_complete(self) -> bool:
        """Whether the whole block is page-locked."""
        return self.num_bytes == self.end - self.begin

    def pieces(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        """Cut a range where chunks meet: CUDA refuses a copy from memory of which only a part is registered.

        Args:
            address: Of the range; anywhere.
            num_bytes: Of the range.

        Returns:
            (address, bytes) of the pieces, in order.
        """
        end = address + num_bytes
        if address < self.begin or end > self.end:
            return [(address, num_bytes)]
        pieces = []
        while address < end:
            chunk = (address - self.begin) // self.chunk_bytes
            stop = min(end, self.begin + (chunk + 1) * self.chunk_bytes)
            pieces.append((address, stop - address))
            address = stop
        return pieces

    def close(self) -> None:
        """Stop the thread and unregister what it registered. Nothing may copy from the block any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        while self._pinned:
            self._unregister(self._pinned.pop())
        _OPEN.discard(self)

    def _run(self) -> None:
        for address in range(self.begin, self.end, self.chunk_bytes):
            num_bytes = min(self.chunk_bytes, self.end - address)
            wanted = (address + num_bytes - self.begin) / (self.end - self.begin)
            with self._changed:
                while self._share < wanted and not self._is_closed and self._changed.wait(timeout=STALLED_S):
                    pass
                if self._is_closed:
                    return
            try:
                self._register(address, num_bytes)
            except Exception as exc:  # delivered as the reason; the block works as it is
                done, total = address - self.begin, self.end - self.begin
                self.failure = f"{total - done} of {total} bytes of host memory stay pageable, copies are slower: {exc}"
                if self._on_failure is not None:
                    self._on_failure(self.failure)
                return
            self._pinned.append(address)

    def __repr__(self) -> str:
        state = "failed" if self.failure else "complete" if self.is_complete else "running"
        return f"<Pinning {state}: {self.num_bytes} of {self.end - self.begin} bytes>"
