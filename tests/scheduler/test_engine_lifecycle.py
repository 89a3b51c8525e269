"""How requests and engines end: cancelled, abandoned, closed, in the wrong loop; everything they held comes back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tiny import PROMPT, TINY, greedy, quiet

import expertstream
from expertstream.scheduler.errors import EngineClosedError, WrongLoopError

pytestmark = pytest.mark.anyio

NUM_TOKENS = 24


async def tokens_of(engine: expertstream.Engine, prompt: Any = PROMPT, num_tokens: int = NUM_TOKENS) -> list[int]:
    return [token.id async for token in engine.generate(prompt, max_tokens=num_tokens)]


def nothing_is_held(engine: expertstream.Engine) -> None:
    loaded = engine._opened.loaded
    for pool in (loaded.pool, loaded.draft_pool):
        assert pool is None or pool.num_free == pool.num_pages
    for layer in loaded.built.layers:
        loaded.store.table(layer.number).check_integrity()
        assert loaded.store.table(layer.number).num_held == 0


async def test_a_cancelled_generation_releases_everything_at_every_await() -> None:
    """Contract 1.4: a request cancelled at any await of its life costs no step and leaves nothing behind."""
    async with expertstream.open(TINY, **quiet(slots="50%", speculate=1)) as engine:
        for num_tokens in range(5):
            for turns in range(0, 12, 3):
                got: list[int] = []
                task = asyncio.create_task(_collect(engine, got))
                while len(got) < num_tokens:
                    await asyncio.sleep(0)
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        assert await tokens_of(engine) == greedy()[:NUM_TOKENS]
        assert engine.statistics().steps_failed == 0
        nothing_is_held(engine)


async def _collect(engine: expertstream.Engine, got: list[int]) -> None:
    async for token in engine.generate(PROMPT, max_tokens=40):
        got += [token.id]  # seen by the test as it grows


@pytest.mark.parametrize("how", ["aclose", "garbage"])
async def test_an_abandoned_generation_ends_after_the_step_in_progress(how: str) -> None:
    """Leaving the iterator, closed or forgotten, ends the request: its pages return and the next request runs."""
    async with expertstream.open(TINY, **quiet(slots="50%")) as engine:
        stream: Any = engine.generate(PROMPT, max_tokens=500)
        async for token in stream:
            if token.index == 2:
                break
        if how == "aclose":
            await stream.aclose()
        del stream, token
        assert await tokens_of(engine) == greedy()[:NUM_TOKENS]
        assert engine.statistics().steps < 100
        nothing_is_held(engine)


async def test_a_timeout_around_a_generation_releases_everything() -> None:
    """`asyncio.timeout` and cancel scopes end a generation like any cancellation."""
    async with expertstream.open(TINY, **quiet(slots="50%")) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await tokens_of(engine, num_tokens=100_000)
        assert await tokens_of(engine) == greedy()[:NUM_TOKENS]
        nothing_is_held(engine)


async def closed_while_a_step_waits(
    engine: expertstream.Engine, entered: threading.Event, go_on: threading.Event
) -> None:
    """Close an engine while a hook keeps its step; whoever waits for tokens is told so."""
    task = asyncio.create_task(tokens_of(engine))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0.01)
    go_on.set()
    await closing
    with pytest.raises(EngineClosedError):
        await task


async def test_closing_in_the_middle_of_a_step_ends_the_step_once_and_the_request_with_an_error() -> None:
    """Contract 1.4: shutdown in the middle of a step ends it once, and who waits for tokens learns of it."""
    entered, go_on = threading.Event(), threading.Event()

    def hook(layer: int, experts: list[list[int]]) -> None:
        entered.set()
        go_on.wait(10)

    engine = await expertstream.open(TINY, **quiet(slots="50%"), routing=hook)
    await closed_while_a_step_waits(engine, entered, go_on)
    statistics = engine.statistics()
    assert (statistics.steps, statistics.steps_failed) == (1, 1)
    assert statistics.violations() == []


async def test_closing_in_the_last_layer_of_a_step_lets_the_step_end_and_cuts_the_request_short() -> None:
    """Contract 1.4: a step that is past its last check ends well, and its request is not taken for a finished one."""
    layers: list[int] = []
    entered, go_on = threading.Event(), threading.Event()

    def hook(layer: int, experts: list[list[int]]) -> None:
        if layers.count(0) == 2 and layer == max(layers):  # the second step: the first one has shown the layers
            entered.set()
            go_on.wait(10)
        layers.append(layer)

    engine = await expertstream.open(TINY, **quiet(slots="50%"), routing=hook)
    await closed_while_a_step_waits(engine, entered, go_on)
    statistics = engine.statistics()
    assert (statistics.steps, statistics.steps_failed) == (2, 0)
    assert statistics.violations() == []


async def test_aclose_any_number_of_times_from_any_task() -> None:
    """Closing is idempotent and concurrent; after it every call says that the engine is closed; threads are gone."""
    before = set(threading.enumerate())
    engine = await expertstream.open(TINY, **quiet(slots="50%"))
    await tokens_of(engine, num_tokens=3)
    await asyncio.gather(*(engine.aclose() for _ in range(5)))
    await engine.aclose()
    for call in (lambda: tokens_of(engine), lambda: engine.logits(PROMPT), lambda: engine.tokenize(PROMPT)):
        with pytest.raises(EngineClosedError):
            await call()
    assert engine.statistics().steps == 3
    assert {t for t in threading.enumerate() if t.name.startswith("expertstream")} <= before
    assert engine._opened.loaded.reader.num_open_files == 0


async def test_requests_waiting_at_closing_end_with_an_error() -> None:
    """A request that never started ends with EngineClosedError, not with silence."""
    engine = await expertstream.open(TINY, **quiet(slots="50%"))
    tasks = [asyncio.create_task(tokens_of(engine, num_tokens=200)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await engine.aclose()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineClosedError] * 3


async def test_an_engine_is_refused_outside_its_loop() -> None:
    """An engine belongs to the loop that opened it; elsewhere the error says what to do."""
    async with expertstream.open(TINY, **quiet(slots="50%")) as engine:

        def elsewhere(call: Callable[[], Any]) -> BaseException | None:
            try:
                asyncio.run(call())
            except BaseException as exc:
                return exc
            return None

        error = await asyncio.to_thread(elsewhere, lambda: engine.logits(PROMPT))
        assert isinstance(error, WrongLoopError)
        assert "open one per loop" in str(error)
        assert await tokens_of(engine, num_tokens=2) == greedy()[:2]


async def test_open_cancelled_half_way_leaves_no_thread() -> None:
    """Cancelling `open` waits for what was started and stops it."""
    before = set(threading.enumerate())
    for delay in (0.0, 0.02, 0.1):
        task = asyncio.ensure_future(_open_only())
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    deadline = time.monotonic() + 30
    while {t for t in threading.enumerate() if t.name.startswith("expertstream")} - before:
        assert time.monotonic() < deadline, "a thread was left behind"
        await asyncio.sleep(0.01)


async def _open_only() -> None:
    engine = await expertstream.open(TINY, **quiet(slots="50%"))
    await engine.aclose()
    await asyncio.sleep(10)


async def test_a_request_that_is_left_between_drafts_costs_no_further_draft() -> None:
    """Contract 1.4: leaving a request ends it after the step in progress, in the middle of its drafts too."""
    drafting, left = threading.Event(), threading.Event()

    def hook(layer: int, experts: list[list[int]]) -> None:
        if layer == 8 and engine.statistics().steps_by_kind["paged"] == 2:  # the head's layer: a draft is computed
            drafting.set()
            left.wait(10)

    async with expertstream.open(TINY, **quiet(slots="50%", speculate=4), routing=hook) as engine:
        task = asyncio.create_task(tokens_of(engine, num_tokens=40))
        while not drafting.is_set():
            await asyncio.sleep(0.001)
        drafts = engine.statistics().steps_by_kind["draft"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left.set()
        while engine._scheduler.num_running:
            await asyncio.sleep(0.001)
        assert engine.statistics().steps_by_kind["draft"] == drafts + 1
        assert engine.statistics().steps_by_kind["paged"] == 2
        nothing_is_held(engine)
