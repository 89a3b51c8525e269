"""State of one process: kept within it, and never taken over a fork."""

from __future__ import annotations

import pytest

from expertstream.steps import process_local
from expertstream.steps.process_local import ProcessLocal


def test_process_local_keeps_its_value_within_a_process() -> None:
    """The first use makes the value; later ones get the same."""
    local = ProcessLocal(list[int])
    assert local.get() is local.get()
    assert repr(local) == "<ProcessLocal of 1 processes>"


def test_process_local_of_a_child_with_its_parents_pid_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 4.4: in a pid namespace of its own a forked child may have its parent's pid, and starts afresh."""
    monkeypatch.setattr(process_local, "_generation", process_local._generation)
    local = ProcessLocal(list[int])
    of_parent = local.get()
    process_local._count_fork()
    assert local.get() is not of_parent
