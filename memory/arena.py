"""The host arena: one exact allocation of expert records, a level with a residency of its own.

Reader threads fill it straight from the files, in order, while the engine already works. An expert wanted before its
turn is read first. When it holds fewer records than there are experts, the rest live on disk only and the least
recently used record that nothing copies from makes room.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from .arena_space import ArenaSpace
from .outcome import Outcome
from .reader import FileReader
from .records import ExpertKey, RecordLayout, RecordSource

__all__ = ["HostArena"]


class HostArena:
    """Expert records in host memory.

    Args:
        space: The allocation, cut into record places per record size.
        layouts: MoE layer → record layout.
        sources: Every expert of the store → where its bytes are.
        reader: Positioned reads of the shards; not closed by the arena.
        num_threads: Reader threads.
        on_progress: Called from a reader thread with (bytes read ahead so far, bytes to read ahead); must not raise.
    """

    def __init__(
        self,
        space: ArenaSpace,
        layouts: Mapping[int, RecordLayout],
        sources: Mapping[ExpertKey, RecordSource],
        reader: FileReader,
        *,
        num_threads: int,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._space, self._layouts, self._sources, self._reader = space, layouts, sources, reader
        self._changed = threading.Condition()
        self._place: dict[ExpertKey, int] = {}
        self._reading: set[ExpertKey] = set()
        self._failed: dict[ExpertKey, BaseException] = {}
        self._holds: dict[ExpertKey, int] = {}
        self._recent: dict[int, OrderedDict[ExpertKey, None]] = {size: OrderedDict() for size in space.record_sizes}
        self._urgent: deque[ExpertKey] = deque()
        self._background = deque(space.choose_initial(sources, layouts))
        self._ahead = set(self._background)
        self._progress = (on_progress, sum(sources[key].num_bytes for key in self._ahead))
        self._bytes_read = 0
        self._is_closed = False
        self._death: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"expertstream-reader-{i}", daemon=True) for i in range(num_threads)
        ]

    def start(self) -> None:
        """Start filling in the background. Returns at once."""
        for thread in self._threads:
            thread.start()

    def require(self, keys: Sequence[ExpertKey]) -> tuple[Outcome, dict[ExpertKey, BaseException]]:
        """Hold these records and wait until they are in host memory, reading absent ones before all others.

        Args:
            keys: Distinct; at most `max_held` of one record size, counting those already held.

        Returns:
            What was read on demand, and the error of each key that could not be read (those are not held).
        """
        with self._changed:
            absent = [key for key in keys if key not in self._place]
            for key in keys:
                self._holds[key] = self._holds.get(key, 0) + 1
                if key in self._place:
                    self._recent[self._size(key)].move_to_end(key)
            self._urgent.extend(key for key in absent if key not in self._reading)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_ended() or all(map(self._is_settled, absent)))
            errors = {key: self._failed[key] for key in absent if key in self._failed}
            if self._has_ended():
                ended = self._ending()
                errors |= {key: ended for key in absent if not self._is_settled(key)}
        self.release(errors)
        num_bytes = sum(self._sources[key].num_bytes for key in absent if key not in errors)
        return Outcome(reads=len(absent) - len(errors), bytes_disk=num_bytes), errors

    def release(self, keys: Iterable[ExpertKey]) -> None:
        """Let go of records held by `require`: nothing copies from them any more."""
        with self._changed:
            for key in keys:
                self._holds[key] -= 1
                if not self._holds[key]:
                    del self._holds[key]
                    self._failed.pop(key, None)  # everybody who waited for it has seen it
            self._changed.notify_all()

    def record(self, key: ExpertKey) -> torch.Tensor:
        """Return uint8 [record bytes] of a held record; it keeps its place and content while held."""
        return self._space.record(self._size(key), self._place[key])

    @property
    def num_bytes(self) -> int:
        """Bytes of the allocation."""
        return self._space.num_bytes

    @property
    def num_resident(self) -> int:
        """Records in host memory."""
        with self._changed:
            return len(self._place)

    @property
    def is_complete(self) -> bool:
        """Whether the background filling has ended."""
        with self._changed:
            return not self._background and not self._reading

    def max_held(self, layer: int) -> int:
        """Return how many records of this layer's size can be held at once."""
        return self._space.capacity(self._layouts[layer].num_bytes)

    def close(self) -> None:
        """Stop reading, wait for the reader threads, wake whoever waits. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _run(self) -> None:
        try:
            while (task := self._take()) is not None:
                self._fill(*task)
        except BaseException as exc:  # a fault of ours: nobody may wait for ever for what this thread had taken
            with self._changed:
                self._death = exc
                self._changed.notify_all()
            raise

    def _fill(self, key: ExpertKey, place: int) -> None:
        error = self._read(key, place)
        with self._changed:
            self._reading.discard(key)
            size = self._size(key)
            if error is None:
                self._place[key] = place
                self._recent[size][key] = None
            else:
                self._space.give_back(size, place)
                if key in self._holds:  # somebody waits for it; a failed background read is tried again on demand
                    self._failed[key] = error
            is_ahead = key in self._ahead
            if is_ahead:
                self._ahead.discard(key)
                self._bytes_read += self._sources[key].num_bytes
            done = self._bytes_read
            self._changed.notify_all()
        on_progress, total = self._progress
        if on_progress is not None and is_ahead:
            on_progress(done, total)

    def _has_ended(self) -> bool:
        return self._is_closed or self._death is not None

    def _ending(self) -> RuntimeError:
        ended = RuntimeError("the arena is closed" if self._is_closed else "a reader thread of the arena has died")
        ended.__cause__ = self._death
        return ended

    def _take(self) -> tuple[ExpertKey, int] | None:
        """Wait for the next record to read and a place for it; urgent ones first. None when the arena closes."""
        with self._changed:
            while not self._is_closed:
                task = self._take_urgent() or self._take_background()
                if task is not None:
                    self._reading.add(task[0])
                    return task
                self._changed.wait()
        return None

    def _take_urgent(self) -> tuple[ExpertKey, int] | None:
        queue = self._urgent
        while queue and (queue[0] in self._place or queue[0] in self._reading):
            queue.popleft()
        place = self._make_room(self._size(queue[0])) if queue else None
        return None if place is None else (queue.popleft(), place)

    def _take_background(self) -> tuple[ExpertKey, int] | None:
        while self._background:
            key = self._background.popleft()
            if key not in self._place and key not in self._reading:
                place = self._space.take_free(self._size(key))
                if place is not None:
                    return key, place
                # An urgent record took the place meant for this one, which is now read when it is wanted.
        return None

    def _is_settled(self, key: ExpertKey) -> bool:
        return key in self._place or key in self._failed

    def _size(self, key: ExpertKey) -> int:
        return self._layouts[key.layer].num_bytes

    def _make_room(self, size: int) -> int | None:
        place = self._space.take_free(size)
        if place is None:
            victim = next((key for key in self._recent[size] if key not in self._holds), None)
            if victim is not None:
                del self._recent[size][victim]
                place = self._place.pop(victim)
        return place

    def _read(self, key: ExpertKey, place: int) -> BaseException | None:
        record = self._space.record(self._size(key), place)
        try:
            self._read_pieces(self._sources[key], self._layouts[key.layer].dtype, record)
        except Exception as exc:  # delivered to whoever requires the record
            return exc
        return None

    def _read_pieces(self, source: RecordSource, dtype: torch.dtype, record: torch.Tensor) -> None:
        for piece in source.pieces:
            end = piece.record_offset + piece.num_elements * dtype.itemsize
            target = record[piece.record_offset : end]
            if piece.dtype == dtype:
                self._reader.read_into(piece.file, piece.offset, target.numpy().data)
                continue
            raw = torch.empty(piece.num_bytes, dtype=torch.uint8)
            self._reader.read_into(piece.file, piece.offset, raw.numpy().data)
            target.view(dtype).copy_(raw.view(piece.dtype))

    def __repr__(self) -> str:
        with self._changed:
            return (
                f"<HostArena {self._space.num_bytes} bytes: {len(self._place)} of {len(self._sources)} experts "
                f"resident, {len(self._holds)} held, {len(self._reading)} being read>"
            )
