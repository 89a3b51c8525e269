"""What is halted when the interpreter ends, after the final record is written.

A daemonic thread that returns from native code while the interpreter is being torn down ends the whole process by
`std::terminate`. So threads that compute, copy or read are told to stop, and are waited for, before that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from .process_local import ProcessLocal

__all__ = ["halt_at_exit", "run_halts"]

_halts: ProcessLocal[dict[int, Callable[[], None]]] = ProcessLocal(dict)


def halt_at_exit(halt: Callable[[], None]) -> Callable[[], None]:
    """Have a function called when the interpreter ends.

    Args:
        halt: Stops threads and waits for them; what it raises is dropped, as there is nobody left to tell.

    Returns:
        A function that forgets it again; for whoever has stopped them earlier.
    """
    halts = _halts.get()
    halts[id(halt)] = halt

    def forget() -> None:
        halts.pop(id(halt), None)

    return forget


def run_halts() -> None:
    """Call every function that was not forgotten, once. A forked child has none of its parent's: it has no threads."""
    halts = _halts.get()
    while halts:
        _, halt = halts.popitem()
        with contextlib.suppress(Exception):
            halt()
