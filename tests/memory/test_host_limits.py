"""What the kernel and the cgroups leave, read from trees made here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from expertstream.memory import host_limits as module
from expertstream.memory.host_limits import available_host_bytes

MIB = 2**20


def _meminfo(root: Path, kib: int) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    text = f"MemTotal:       99999999 kB\nMemFree:           1 kB\nMemAvailable:   {kib} kB\nBuffers: 0 kB\n"
    (root / "proc/meminfo").write_text(text)


def _cgroup(root: Path, path: str, maximum: str, current: int, inactive_file: int | None = None) -> None:
    folder = root / "sys/fs/cgroup" / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(maximum + "\n")
    (folder / "memory.current").write_text(f"{current}\n")
    if inactive_file is not None:
        (folder / "memory.stat").write_text(f"anon 5\nfile 9\ninactive_file {inactive_file}\nactive_file 1\n")


def _member(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(text)


def test_without_a_cgroup_the_kernel_says_what_is_available(tmp_path: Path) -> None:
    """MemAvailable counts, not MemFree: the page cache gives way."""
    _meminfo(tmp_path, 4096)
    assert available_host_bytes(tmp_path) == 4 * MIB


def test_cgroup_limit_below_the_hosts_memory_counts(tmp_path: Path) -> None:
    """What is left in the cgroup is its limit less its use, the page cache given back."""
    _meminfo(tmp_path, 1 << 20)
    _member(tmp_path, "0::/box\n")
    _cgroup(tmp_path, "/box", str(64 * MIB), 40 * MIB)
    assert available_host_bytes(tmp_path) == 24 * MIB
    _cgroup(tmp_path, "/box", str(64 * MIB), 40 * MIB, inactive_file=30 * MIB)
    assert available_host_bytes(tmp_path) == 54 * MIB


def test_tightest_of_the_cgroups_above_counts(tmp_path: Path) -> None:
    """A limit of a parent holds for its children, whether theirs is larger or absent."""
    _meminfo(tmp_path, 1 << 20)
    _member(tmp_path, "0::/slice/box/leaf\n")
    _cgroup(tmp_path, "/slice", str(32 * MIB), 30 * MIB)
    _cgroup(tmp_path, "/slice/box", "max", 20 * MIB)
    _cgroup(tmp_path, "/slice/box/leaf", str(900 * MIB), 10 * MIB)
    assert available_host_bytes(tmp_path) == 2 * MIB


def test_limit_at_the_namespaces_root_counts(tmp_path: Path) -> None:
    """In a container the process is in the root of its namespace, whose folder has the limit."""
    _meminfo(tmp_path, 1 << 20)
    _member(tmp_path, "12:cpu:/x\n0::/\n")
    _cgroup(tmp_path, "/", str(8 * MIB), 5 * MIB)
    assert available_host_bytes(tmp_path) == 3 * MIB


def test_hosts_memory_below_the_cgroup_limit_counts(tmp_path: Path) -> None:
    """A generous limit does not make memory."""
    _meminfo(tmp_path, 1024)
    _member(tmp_path, "0::/box\n")
    _cgroup(tmp_path, "/box", str(64 * MIB), 0)
    assert available_host_bytes(tmp_path) == MIB


def test_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    """What is left is never negative."""
    _meminfo(tmp_path, 1024)
    _member(tmp_path, "0::/box\n")
    _cgroup(tmp_path, "/box", str(8 * MIB), 9 * MIB)
    assert available_host_bytes(tmp_path) == 0


@pytest.mark.parametrize("line", ["9:memory:/box\n", "0::/absent\n", "nonsense\n", ""])
def test_other_hierarchies_and_unreadable_entries_leave_the_kernels_word(tmp_path: Path, line: str) -> None:
    """A cgroup that says nothing limits nothing."""
    _meminfo(tmp_path, 2048)
    _member(tmp_path, line)
    assert available_host_bytes(tmp_path) == 2 * MIB


@pytest.mark.parametrize("text", ["MemAvailable:\n", "MemAvailable: many kB\n", "MemTotal: 5 kB\n", ""])
def test_without_any_source_the_systems_page_count_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Where /proc says nothing usable, sysconf answers, or nobody."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(text)
    monkeypatch.setattr(module, "_sysconf_available", lambda: 77)
    assert available_host_bytes(tmp_path) == 77


def test_system_without_sysconf_answers_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not knowing is None, not zero."""

    def refuse(name: str) -> int:
        raise ValueError(f"unrecognized configuration name {name}")

    monkeypatch.setattr(os, "sysconf", refuse, raising=False)
    assert available_host_bytes(tmp_path) is None
    monkeypatch.delattr(os, "sysconf")
    assert available_host_bytes(tmp_path) is None


def test_this_machine_has_memory() -> None:
    """The real sources can be read."""
    found = available_host_bytes()
    assert found is None or found > 0
