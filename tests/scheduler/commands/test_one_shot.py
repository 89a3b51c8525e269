"""The event loop of a command, and its signals."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path

import pytest

from expertstream.scheduler.commands import one_shot


@pytest.mark.parametrize("use_uvloop", [True, False])
def test_one_shot_runs_on_uvloop_where_it_can_be_imported(use_uvloop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line chooses the loop itself."""
    pytest.importorskip("uvloop")
    if not use_uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    modules: list[str] = []

    async def work() -> int:
        modules.append(type(asyncio.get_running_loop()).__module__)
        return 5

    assert one_shot.run_one_shot(work) == 5
    assert modules[0].startswith("uvloop") == use_uvloop


def test_one_shot_outside_the_main_thread_changes_no_handler() -> None:
    """Contract 5.5: handlers are installed in the main thread only; elsewhere a command still runs."""
    before = signal.getsignal(signal.SIGTERM)
    found: list[object] = []

    async def work() -> int:
        found.append(signal.getsignal(signal.SIGTERM))
        return 0

    thread = threading.Thread(target=lambda: found.append(one_shot.run_one_shot(work)))
    thread.start()
    thread.join()
    assert found == [before, 0]


def test_one_shot_cancelled_without_a_signal_is_a_cancellation() -> None:
    """Only a signal becomes an exit code: a cancellation from elsewhere is not swallowed."""

    async def work() -> int:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        one_shot.run_one_shot(work)


def test_one_shot_work_that_ends_despite_a_signal_is_still_stopped_by_it() -> None:
    """The exit code tells of the signal even where the work swallowed its cancellation."""

    async def work() -> int:
        signal.raise_signal(signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 0
        return 1

    assert one_shot.run_one_shot(work) == 128 + signal.SIGTERM


def test_one_shot_uvloop_that_is_broken_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A uvloop whose import fails in any way is no reason to fail: asyncio's own loop serves."""
    (tmp_path / "uvloop.py").write_text("raise RuntimeError('planted')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)

    async def work() -> int:
        return 5

    assert one_shot.run_one_shot(work) == 5
