"""A log file that is appended to in whole lines and followed when it is rotated away."""

from __future__ import annotations

import os
import stat
import threading
import time

from .process_local import ProcessLocal

__all__ = ["LogFile"]

# Never wait: a FIFO that nobody reads fails at once instead of holding up a step. A regular file knows no difference.
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
for _name in ("O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"):
    _FLAGS |= getattr(os, _name, 0)


# A write of one line takes microseconds; a process that was killed is not back, with its imports, within a second.
_SETTLED_S = 1.0


class LogFile:
    """Appends whole lines to one file; several processes may share it.

    Where a file can be renamed while it is open (not on Windows) it stays open between lines.

    Args:
        path: The file; created when missing, its folder is not. A relative path is resolved now.
        keep_open: Whether the file stays open between two lines.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_open: bool = os.name != "nt") -> None:
        self.path = os.path.abspath(path)
        self._keep_open = keep_open
        self._lock = ProcessLocal(threading.RLock)
        self._fd: int | None = None
        self._opened: os.stat_result | None = None
        self._is_torn = False

    @property
    def key(self) -> str:
        """Equal for two spellings of one file."""
        return os.path.normcase(os.path.realpath(self.path))

    def append(self, line: bytes) -> None:
        """Writes one line, with its newline, in one write.

        Raises:
            OSError: The file cannot be opened or written. A part of a line that a full disk took is taken back, or
                where it cannot be, the next line starts on a line of its own.
        """
        with self._lock.get():
            try:
                self._append(self._current(), line)
            finally:
                if not self._keep_open:
                    self.close()

    def close(self) -> None:
        """Closes the file; a later line opens it again."""
        with self._lock.get():
            fd, opened = self._fd, self._opened
            self._fd = self._opened = None
            if fd is not None and opened is not None and _is_still(fd, opened):
                os.close(fd)

    def _append(self, fd: int, line: bytes) -> None:
        payload = b"\n" + line if self._is_torn else line
        written = os.write(fd, payload)
        if written == len(payload):
            self._is_torn = False
            return
        # Not written on: another process's line may follow by now, and a rest behind it would be two torn lines.
        if written:
            self._is_torn = not self._take_back(fd, written) or self._is_torn
        raise OSError(f"Wrote {written} of {len(payload)} bytes to {self.path}.")

    def _take_back(self, fd: int, written: int) -> bool:
        try:
            end = os.lseek(fd, 0, os.SEEK_CUR)
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != end:
                return False
            os.ftruncate(fd, end - written)
        except OSError:
            return False
        return True

    def _current(self) -> int:
        if self._fd is not None and not self._is_current():
            self.close()
        if self._fd is None:
            self._fd = _above_standard(os.open(self.path, _FLAGS, 0o666))
            self._opened = os.fstat(self._fd)
            self._is_torn = _ends_in_a_torn_line(self.path, self._opened)
        return self._fd

    def _is_current(self) -> bool:
        if self._fd is None or self._opened is None or not _is_still(self._fd, self._opened):
            return False
        try:
            return os.path.samestat(os.stat(self.path), self._opened)
        except FileNotFoundError:
            return False

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LogFile {self.path}: {'closed' if self._fd is None else 'open'}>"


def _above_standard(fd: int) -> int:
    """Moves a descriptor off 0, 1 and 2: where stdout was closed, what others print would land in the log."""
    if fd > 2:
        return fd
    try:
        return _above_standard(os.dup(fd))
    finally:
        os.close(fd)


def _is_still(fd: int, opened: os.stat_result) -> bool:
    """Whether the descriptor is the file that was opened: a daemon may have closed it, and its number be another's."""
    try:
        return os.path.samestat(os.fstat(fd), opened)
    except OSError:
        return False


def _ends_in_a_torn_line(path: str, status: os.stat_result) -> bool:
    """Whether a process that was killed while writing left half a line, which the next line must not continue.

    A line that another process is writing just now looks the same, and a newline would be one too many: half a line
    counts as left only when it is old (wall time, as the file has no other).
    """
    is_old = time.time() - status.st_mtime > _SETTLED_S
    if not stat.S_ISREG(status.st_mode) or status.st_size == 0 or not is_old:
        return False
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False
