"""A step task and the end of its loop: the step ends when its thread has left the forward, and only then."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tiny import TINY, quiet

import expertstream
from expertstream.scheduler.errors import EngineDeadError

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


@pytest.mark.parametrize("raised", [StopIteration, asyncio.CancelledError, GeneratorExit, ValueError])
async def test_whatever_a_hook_raises_fails_its_request_and_not_the_engine(raised: type[BaseException]) -> None:
    """What runs inside a step may raise anything: its request ends with an error, and the next one is served."""
    faults = [raised("planted")]

    def hook(layer: int, experts: list[list[int]]) -> None:
        if faults:
            raise faults.pop()

    async with expertstream.open(TINY, **quiet(slots="50%"), routing=hook) as engine:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            await asyncio.wait_for(engine.logits([5, 6, 7]), PATIENCE_S)
        assert "planted" in str(caught.value)
        assert not isinstance(caught.value, EngineDeadError)
        await asyncio.wait_for(engine.logits([5, 6, 7]), PATIENCE_S)


async def test_step_that_is_cancelled_twice_still_outlives_its_thread() -> None:
    """Contract 1.4: a second cancellation does not end a step whose thread is inside the forward."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(layer: int, experts: list[list[int]]) -> None:
        entered.set()
        go_on.wait(PATIENCE_S)

    engine = await expertstream.open(TINY, **quiet(slots="50%"), routing=hold)
    before = asyncio.all_tasks()
    forward = asyncio.ensure_future(engine.logits([5, 6, 7]))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    cancelled = asyncio.all_tasks() - before
    for _ in range(3):
        for task in cancelled:
            task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert (forward.cancelled(), engine.clock.steps) == (True, 0)
    go_on.set()
    await asyncio.wait(cancelled)
    assert engine.statistics().steps_failed == 1
    await engine.aclose()
