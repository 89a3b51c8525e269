"""A step task and the end of its loop: the step ends when its thread has left the forward, and only then."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tiny import TINY, quiet

import expertstream

pytestmark = pytest.mark.anyio

PATIENCE_S = 20.0


async def test_step_that_a_loop_shutting_down_cancels_ends_when_its_thread_has_left_the_forward() -> None:
    """Contract 1.4: cancelled with every task of its loop, a step stops at its next look-up, ends once, as failed."""
    entered, go_on, told = threading.Event(), threading.Event(), list[int]()

    def hold(layer: int, experts: list[list[int]]) -> None:
        told.append(layer)
        entered.set()
        go_on.wait(PATIENCE_S)

    engine = await expertstream.open(TINY, **quiet(slots="50%"), routing=hold)
    before = asyncio.all_tasks()
    forward = asyncio.ensure_future(engine.logits([5, 6, 7]))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    cancelled = asyncio.all_tasks() - before
    for task in cancelled:
        task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert (forward.cancelled(), engine.clock.steps, "open" in repr(engine.clock)) == (True, 0, True)
    go_on.set()
    await asyncio.wait(cancelled)
    got = engine.statistics()
    assert (got.steps_by_kind["dense"], got.steps, got.steps_failed) == (1, 1, 1)
    assert told == [0]
    assert got.lookups > 0
    assert got.violations() == []
    await engine.aclose()
