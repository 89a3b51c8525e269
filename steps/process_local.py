"""State that belongs to one process: a forked child starts with a fresh value, and with locks that nobody holds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["ProcessLocal", "watch_forks"]

T = TypeVar("T")

# Forks counted since the first ancestor. The pid alone can repeat: in a fresh pid namespace the child is 1, as its
# parent may be.
_generation = 0
_is_watching = False


class ProcessLocal(Generic[T]):
    """One value per process, made on first use.

    No lock guards it: one inherited over a fork could be held for ever. `dict.setdefault` lets one of two threads win.
    """

    __slots__ = ("_make", "_values")

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[tuple[int, int], T] = {}

    def get(self) -> T:
        """The value of the present process."""
        key = (_generation, os.getpid())
        value = self._values.get(key)
        return self._values.setdefault(key, self._make()) if value is None else value

    def __repr__(self) -> str:
        return f"<ProcessLocal of {len(self._values)} processes>"


def watch_forks() -> None:
    """Registers the one fork hook, where the platform has it; children inherit it, so once is enough."""
    global _is_watching
    if not _is_watching and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_count_fork)
    _is_watching = True


def _count_fork() -> None:
    global _generation
    _generation += 1
