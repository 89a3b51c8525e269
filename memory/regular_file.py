"""Refuses what is no regular file before it is opened."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import CheckpointError

__all__ = ["regular_bytes"]


def regular_bytes(file: Path, error: type[CheckpointError], expected: str) -> int:
    """Asks for the size of a file before it is opened: opening a named pipe would wait for a writer, for ever.

    Args:
        file: the file.
        error: the class to raise.
        expected: what it should be, for the message.

    Returns:
        Its bytes.

    Raises:
        CheckpointError: or the class asked for, if it is no regular file.
        OSError: if the system knows nothing of it.
    """
    status = os.stat(file)
    if stat.S_ISDIR(status.st_mode):
        raise error(file, f"it is a directory where {expected} is expected")
    if not stat.S_ISREG(status.st_mode):
        raise error(file, f"it is a device, a pipe or a socket where {expected} is expected")
    return status.st_size
