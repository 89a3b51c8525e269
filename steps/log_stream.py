"""A text stream that log lines are written to, past its buffer."""

from __future__ import annotations

import os
from typing import TextIO

__all__ = ["LogStream"]


class LogStream:
    """Writes whole lines to a text stream.

    What a broken pipe left in the stream's buffer would fail again when the interpreter flushes it, and change the exit
    code: so lines go to the descriptor, where there is one.
    """

    __slots__ = ("_is_torn", "_stream")

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_torn = False

    @property
    def name(self) -> object:
        """What the stream calls itself, as `<stderr>`."""
        return getattr(self._stream, "name", type(self._stream).__name__)

    def write(self, line: str) -> None:
        """Writes one line, with its newline; characters that the stream's encoding lacks are escaped.

        Raises:
            OSError: The other end is gone, or is full and does not block.
            ValueError: The stream is closed.
        """
        text = f"\n{line}" if self._is_torn else line
        self._stream.flush()
        try:
            fd = self._stream.fileno()
        except (AttributeError, OSError):  # a stream of Python's own, such as `io.StringIO`
            self._stream.write(text)
            self._stream.flush()
            return
        self._write(fd, text.encode(getattr(self._stream, "encoding", None) or "utf-8", "backslashreplace"))

    def _write(self, fd: int, rest: bytes) -> None:
        while rest:
            written = os.write(fd, rest)
            rest = rest[written:]
            # A pipe that does not block may take a part and refuse the rest, which the next line must not continue.
            self._is_torn = bool(rest)

    def __repr__(self) -> str:
        return f"<LogStream {self.name}>"
