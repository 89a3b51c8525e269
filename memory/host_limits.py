"""How much host memory this process may still take: what the kernel calls available, and what the cgroup leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_host_bytes"]


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that can be taken without swapping, or None where no source says.

    Args:
        root: Where /proc and /sys hang; another folder in tests.

    Source: proc(5) MemAvailable; the kernel's cgroup-v2 documentation for memory.max and memory.current. Elsewhere
        sysconf's available pages.
    """
    found = [value for value in (_mem_available(root), *_cgroup_left(root)) if value is not None]
    return max(0, min(found)) if found else _sysconf_available()


def _mem_available(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        amount = rest.removesuffix("kB").strip()
        if name == "MemAvailable" and amount.isdigit():
            return int(amount) * 1024
    return None


def _cgroup_left(root: Path) -> Iterator[int]:
    """Yield what each cgroup above this process leaves; the tightest counts."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, path = line.partition("::")
        if number != "0":
            continue
        top = root / "sys/fs/cgroup"
        folder = top / path.lstrip("/")
        for level in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            limit, used = _read(level / "memory.max").strip(), _read(level / "memory.current").strip()
            if limit.isdigit() and used.isdigit():
                yield int(limit) - int(used) + _reclaimable(level)


def _reclaimable(level: Path) -> int:
    """Return the page cache that the kernel gives back under pressure: reading a checkpoint fills it."""
    for line in _read(level / "memory.stat").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not this kind of system, or not ours to read: another source answers
        return ""


def _sysconf_available() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
