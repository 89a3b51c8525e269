"""Positioned reads from the files of a checkpoint, from several threads at once."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .errors import ReadError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["MAX_CALL_BYTES", "FileReader", "PositionedRead", "SeekAndRead", "default_strategy"]

MAX_CALL_BYTES = 64 * 2**20
"""The most bytes asked for in one system call: some systems refuse 2 GiB, and close() is heard between calls."""

PositionedRead = Callable[[io.FileIO, memoryview, int], int]
"""Fills a byte buffer, or its first part, from an offset of an open file; returns the bytes read, 0 at the end."""

_WILLNEED: int | None = getattr(os, "POSIX_FADV_WILLNEED", None)


def default_strategy() -> PositionedRead:
    """Chooses the best positioned read that this platform has.

    Returns:
        `os.preadv` (no copy, no shared position) where it exists, else `os.pread` (one copy), else `SeekAndRead`.
    """
    preadv: Callable[[int, list[memoryview], int], int] | None = getattr(os, "preadv", None)
    if preadv is not None:
        return lambda raw, view, offset: preadv(raw.fileno(), [view], offset)
    pread: Callable[[int, int, int], bytes] | None = getattr(os, "pread", None)
    if pread is not None:

        def copying(raw: io.FileIO, view: memoryview, offset: int) -> int:
            chunk = pread(raw.fileno(), len(view), offset)
            view[: len(chunk)] = chunk
            return len(chunk)

        return copying
    return SeekAndRead()


class SeekAndRead:
    """The positioned read of a platform that has none. A file has one position, so its calls take turns.

    Args:
        lock: held from the seek to the end of the read.
    """

    def __init__(self, lock: threading.Lock | None = None) -> None:
        self._lock = lock or threading.Lock()

    def __call__(self, raw: io.FileIO, view: memoryview, offset: int) -> int:
        """Reads once; see `PositionedRead`."""
        with self._lock:
            raw.seek(offset)
            return raw.readinto(view) or 0


class _OpenFile:
    __slots__ = ("num_reads", "raw")

    def __init__(self, raw: io.FileIO) -> None:
        self.raw = raw
        self.num_reads = 0


class FileReader:
    """Reads byte ranges of files, and keeps each file open from its first read until `close()`. Any thread may use it.

    Args:
        strategy: how one positioned read is made; None for the best that the platform has.
    """

    def __init__(self, strategy: PositionedRead | None = None) -> None:
        self._positioned_read = strategy or default_strategy()
        self._lock = threading.Lock()
        self._files: dict[Path, _OpenFile] = {}
        self._closed = False

    def __repr__(self) -> str:
        with self._lock:
            reading = sum(held.num_reads for held in self._files.values())
            return f"<FileReader {'closed' if self._closed else 'open'}: {len(self._files)} files, {reading} reads now>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_open_files(self) -> int:
        """Files that are open now; after `close()`, those that a running read still needs."""
        with self._lock:
            return len(self._files)

    def read_into(self, file: Path, offset: int, buffer: WriteableBuffer) -> int:
        """Fills a buffer from a file. Blocks; several threads may read, also the same file.

        Args:
            file: the file; opened on its first read.
            offset: bytes from the start of the file.
            buffer: writable and contiguous; all of it is filled. An empty one reads nothing and opens nothing.

        Returns:
            The bytes read: always the size of the buffer.

        Raises:
            ReadError: if the file ends first, the system reports an error, or the reader is closed. What the buffer
                then holds is undefined.
            ValueError: if the offset is negative or the buffer is read-only.
            TypeError: if the buffer is not contiguous.
        """
        view = memoryview(buffer)
        if view.readonly:
            raise ValueError("buffer must be writable, and is read-only")
        if offset < 0:
            raise ValueError(f"offset must be 0 or more, and is {offset}")
        if view.nbytes == 0:
            return 0
        asked = view.cast("B")
        done = 0
        try:
            with self._borrowed(file) as raw:
                while done < len(asked):
                    count = self._read_part(raw, asked[done : done + MAX_CALL_BYTES], offset + done)
                    if count == 0:
                        raise ReadError(file, offset, len(asked), done, "the file ended")
                    done += count
        except _ClosedError:
            raise ReadError(file, offset, len(asked), done, "the reader is closed") from None
        except OSError as exc:
            raise ReadError(file, offset, len(asked), done, exc.strerror or str(exc)) from exc
        return done

    def advise(self, file: Path, offset: int, nbytes: int) -> bool:
        """Asks the kernel to read ahead, without waiting for it.

        Args:
            file: the file; opened if it was not.
            offset: bytes from the start of the file.
            nbytes: bytes that will be wanted; 0 asks for nothing.

        Returns:
            Whether the kernel accepted the hint: False where there is no such call, where it or the opening failed
            (a read of that file will say why), and once the reader is closed.

        Raises:
            ValueError: if the offset or the number of bytes is negative.
        """
        if offset < 0 or nbytes < 0:
            raise ValueError(f"offset and nbytes must be 0 or more, and are {offset} and {nbytes}")
        # To the kernel a length of 0 means everything up to the end of the file.
        if nbytes == 0 or _WILLNEED is None or not hasattr(os, "posix_fadvise"):
            return False
        try:
            with self._borrowed(file) as raw:
                os.posix_fadvise(raw.fileno(), offset, nbytes, _WILLNEED)
        except (OSError, _ClosedError):
            return False
        return True

    def close(self) -> None:
        """Closes every file, now or, where a read is running in another thread, when that read leaves. Repeatable.

        Raises:
            OSError: the first error of the system in closing a file; all were tried.
        """
        with self._lock:
            self._closed = True
            idle = [file for file, held in self._files.items() if held.num_reads == 0]
            errors = [error for file in idle if (error := _closing_error(self._files.pop(file).raw))]
        if errors:
            raise errors[0]

    def _read_part(self, raw: io.FileIO, part: memoryview, offset: int) -> int:
        while not self._closed:
            try:
                return self._positioned_read(raw, part, offset)
            except InterruptedError:
                continue
        raise _ClosedError

    @contextmanager
    def _borrowed(self, file: Path) -> Iterator[io.FileIO]:
        # A descriptor must outlive the reads that use it: once closed, its number may name another file.
        with self._lock:
            if self._closed:
                raise _ClosedError
            held = self._files.get(file)
            if held is None:
                # FileIO opens with O_CLOEXEC on POSIX and with O_BINARY and O_NOINHERIT on Windows.
                held = self._files[file] = _OpenFile(io.FileIO(file, "rb"))
            held.num_reads += 1
        try:
            yield held.raw
        finally:
            with self._lock:
                held.num_reads -= 1
                if self._closed and held.num_reads == 0:
                    self._files.pop(file).raw.close()


class _ClosedError(Exception):
    """Raised when a read begins or goes on after `close()`."""


def _closing_error(raw: io.FileIO) -> OSError | None:
    try:
        raw.close()
    except OSError as exc:
        return exc
    return None
