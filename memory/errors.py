"""What goes wrong with a checkpoint on disk, each as an exception whose message is made of its fields."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CheckpointError", "HeaderError", "MissingShardError", "ReadError", "TruncatedShardError", "shown"]

_quoting = reprlib.Repr()
_quoting.maxstring = 200
_quoting.maxlong = 40


def shown(value: object) -> str:
    """Quotes a value that came out of a file: on one line, and short even where the value is huge.

    Args:
        value: a name or a parsed JSON value that nobody has checked yet.

    Returns:
        Its `repr`, with the middle left out of anything long.
    """
    return _quoting.repr(value)


class CheckpointError(Exception):
    """Raised when a checkpoint cannot be used: a folder, file, header or tensor is absent or damaged.

    Args:
        path: the folder or file that is at fault.
        problem: one clause about it, without the path and without a full stop.
        tensor: the tensor that is at fault, where it is a single one.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, tensor: str | None = None) -> None:
        # The fields are the arguments, so that copying and pickling rebuild the error from them.
        super().__init__(path, problem, tensor)
        self.path = Path(path)
        self.problem = problem
        self.tensor = tensor

    def __str__(self) -> str:
        subject = str(self.path) if self.tensor is None else f"tensor {shown(self.tensor)} of {self.path}"
        return f"Cannot use {subject}: {self.problem}."


class MissingShardError(CheckpointError):
    """Raised when the index names files that are not in the folder.

    Args:
        path: the folder.
        missing: for each absent file, how many tensors the index puts there.
    """

    def __init__(self, path: str | os.PathLike[str], missing: Mapping[str, int]) -> None:
        self.missing = dict(missing)
        named = ", ".join(f"{shown(name)} ({_num(count, 'tensor')})" for name, count in self.missing.items())
        super().__init__(path, f"the index names {_num(len(self.missing), 'file')} that cannot be found: {named}")
        self.args = (path, self.missing)


class HeaderError(CheckpointError):
    """Raised when a file is no safetensors file, or its header does not describe the file exactly."""


class TruncatedShardError(HeaderError):
    """Raised when a safetensors file is shorter than its header promises.

    Args:
        path: the file.
        expected_bytes: the size that the header asks for; at least that much where the header itself is cut.
        actual_bytes: the size on disk.
        tensor: the first tensor, in file order, whose bytes are not all there; None where the header itself is cut.
    """

    def __init__(
        self, path: str | os.PathLike[str], expected_bytes: int, actual_bytes: int, tensor: str | None = None
    ) -> None:
        self.expected_bytes = expected_bytes
        self.actual_bytes = actual_bytes
        if tensor is None:
            problem = f"the file has {actual_bytes} bytes and its header alone ends at {expected_bytes}"
        else:
            problem = (
                f"the file has {actual_bytes} bytes where its header promises {expected_bytes} "
                f"({expected_bytes - actual_bytes} missing), and this is the first tensor cut"
            )
        super().__init__(path, problem, tensor)
        self.args = (path, expected_bytes, actual_bytes, tensor)


class ReadError(CheckpointError):
    """Raised when bytes of a file cannot be read: the file ended, the system failed, or the reader is closed.

    Args:
        file: the file.
        offset: where the read began, in bytes from the start of the file.
        asked: bytes asked for.
        got: bytes that had arrived before it failed.
        reason: why it stopped there.
    """

    def __init__(self, file: str | os.PathLike[str], offset: int, asked: int, got: int, reason: str) -> None:
        self.file = Path(file)
        self.offset = offset
        self.asked = asked
        self.got = got
        self.reason = reason
        super().__init__(file, f"{asked} bytes asked at offset {offset}, {got} read: {reason}")
        self.args = (file, offset, asked, got, reason)

    def __str__(self) -> str:
        return f"Cannot read {self.path}: {self.problem}."


def _num(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
