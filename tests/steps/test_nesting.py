"""Steps do not nest: real forwards of an engine on the shipped checkpoint, entered where a step is open."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tiny import NUM_LAYERS, TINY, quiet

import expertstream
from expertstream.steps.clock import NestedStepError, StepClock, StepKind

pytestmark = pytest.mark.anyio

IDS = [5, 6, 7]
PATIENCE_S = 20.0
"""Seconds after which a test that waits for something fails instead of hanging."""


async def generated(engine: expertstream.Engine, num_tokens: int = 3) -> list[int]:
    return [token.id async for token in engine.generate(IDS, max_tokens=num_tokens)]


def forwards(engine: expertstream.Engine) -> dict[StepKind, Callable[[], Awaitable[Any]]]:
    """The public entry points of the kinds that one call enters first."""
    import torch

    hidden = torch.zeros(2, engine._opened.loaded.built.model.config.get_text_config().hidden_size)
    return {
        "paged": lambda: generated(engine),
        "dense": lambda: engine.logits(IDS),
        "replay": lambda: engine.replay_layer(0, hidden),
    }


@pytest.mark.parametrize("slots", ["50%", "100%"])
@pytest.mark.parametrize("kind", ["paged", "dense", "replay"])
async def test_forward_inside_an_open_step_is_refused_and_names_both(kind: StepKind, slots: str) -> None:
    """Contract 1.3: a real forward is refused by the boundary of a bare scope, charges nothing, and is not sticky.

    With slots for every expert nothing is ever streamed: the refusal is armed all the same.
    """
    async with expertstream.open(TINY, **quiet(slots=slots)) as engine:
        forward = forwards(engine)[kind]
        with engine.clock.step("draft") as step:
            for _ in range(2):
                with pytest.raises(NestedStepError, match="must not nest") as caught:
                    await forward()
                assert (caught.value.open_kind, caught.value.open_index) == ("draft", 1)
                assert caught.value.refused_kind == kind
                assert step.is_open
                assert engine.statistics().steps == 0
        before = engine.statistics()
        assert (before.steps_by_kind["draft"], before.steps, before.steps_failed, before.lookups) == (1, 1, 0, 0)
        await forward()
        assert engine.statistics().steps_by_kind[kind] > 0


@pytest.mark.parametrize("kind", ["paged", "dense", "replay"])
async def test_forward_inside_an_open_step_of_another_clock_is_refused(kind: StepKind) -> None:
    """Contract 1.3: a nest is one of the call graph: there is one flag, whichever clock or engine opened the step."""
    own = StepClock()
    async with expertstream.open(TINY, **quiet(slots="50%")) as engine:
        with own.step("dense"), pytest.raises(NestedStepError) as caught:
            await forwards(engine)[kind]()
        assert (caught.value.open_kind, caught.value.refused_kind) == ("dense", kind)
        assert (own.steps, own.steps_failed, engine.clock.steps) == (1, 0, 0)


async def test_draft_inside_an_open_step_is_refused_and_names_both() -> None:
    """Contract 1.3: a draft has the guard too: a step that opens in the request's flow after its prefill refuses it."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(layer: int, experts: list[list[int]]) -> None:
        if not entered.is_set():
            entered.set()
            go_on.wait(PATIENCE_S)

    other = StepClock()
    scope = other.step("replay")
    async with expertstream.open(TINY, **quiet(slots="50%", speculate=2), routing=hold) as engine:
        stream = engine.generate(IDS, max_tokens=6)
        first: Any = asyncio.ensure_future(anext(stream))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        request: Any = engine._scheduler._running
        request.context.run(scope.__enter__)
        go_on.set()
        token = await first
        assert token.index == 0
        with pytest.raises(NestedStepError, match="must not nest") as caught:
            await anext(stream)
        assert (caught.value.open_kind, caught.value.open_index, caught.value.refused_kind) == ("replay", 1, "draft")
        assert engine.statistics().steps_by_kind == {"paged": 1, "draft": 0, "dense": 0, "replay": 0}
        request.context.run(scope.__exit__, None, None, None)
        assert (other.steps, other.steps_failed) == (1, 0)
        assert len(await generated(engine, 6)) == 6
        assert engine.statistics().steps_by_kind["draft"] > 0


async def test_generation_with_drafts_inside_an_open_step_is_refused_before_its_first_token() -> None:
    """Contract 1.3: with speculation on the refusal is that of the first forward, and nothing is held afterwards."""
    async with expertstream.open(TINY, **quiet(slots="50%", speculate=2)) as engine:
        with engine.clock.step("paged"), pytest.raises(NestedStepError):
            await generated(engine)
        pools = (engine._opened.loaded.pool, engine._opened.loaded.draft_pool)
        assert [pool.num_free for pool in pools] == [pool.num_pages for pool in pools]
        assert len(await generated(engine)) == 3


async def test_background_task_that_outlives_its_step_may_then_enter_a_forward() -> None:
    """Contract 1.3: a task started inside a step is inside it only while that step is open."""
    async with expertstream.open(TINY, **quiet(slots="50%")) as engine:
        refused, closed = asyncio.Event(), asyncio.Event()

        async def background() -> int:
            with pytest.raises(NestedStepError):
                await engine.logits(IDS)
            refused.set()
            await closed.wait()
            return len(await engine.logits(IDS)) + len(await generated(engine))

        with engine.clock.step("paged"):
            task = asyncio.create_task(background())
            await refused.wait()
        closed.set()
        assert await task == len(IDS) + 3
        assert engine.statistics().steps_failed == 0


async def test_two_tasks_that_want_forwards_are_queued_and_never_overlap() -> None:
    """Contract 1.3: requests of several tasks are neither refused nor overlapped on the clock."""
    async with expertstream.open(TINY, **quiet(slots="50%", speculate=1)) as engine:
        open_now, widest = [0], [0]
        step = engine.clock.step

        class Counting:
            def __init__(self, kind: StepKind) -> None:
                self.scope = step(kind)

            def __enter__(self) -> Any:
                entered = self.scope.__enter__()
                open_now[0] += 1
                widest[0] = max(widest[0], open_now[0])
                return entered

            def __exit__(self, *error: Any) -> Any:
                open_now[0] -= 1
                return self.scope.__exit__(*error)

        engine.clock.step = Counting  # type: ignore[method-assign, assignment]
        kinds = forwards(engine)
        results = await asyncio.gather(*(kinds[kind]() for kind in ("paged", "dense", "replay", "paged", "dense")))
    assert results[0] == results[3]
    assert (widest, open_now, engine.statistics().steps_failed) == ([1], [0], 0)
    kinds_run = engine.statistics().steps_by_kind
    assert (kinds_run["dense"], kinds_run["replay"], kinds_run["draft"] > 0) == (2, 1, True)


@pytest.mark.parametrize("how", ["a bare scope", "a forward"])
async def test_forward_asked_for_by_a_routing_hook_is_refused(how: str) -> None:
    """Contract 1.3: a hook runs inside the step that it is told of, so that what it enters is a nest.

    The forward is entered at the boundary itself: a request of the hook's would wait for the step that waits for it.
    """
    caught: list[NestedStepError] = []
    loop = asyncio.get_running_loop()

    def enter(layer: int, experts: list[list[int]]) -> None:
        if layer != NUM_LAYERS - 1 or caught:
            return
        with pytest.raises(NestedStepError) as error:
            ways[how]()
        caught.append(error.value)

    def bare_scope() -> None:
        with engine.clock.step("replay"):
            pytest.fail("entered a nested step")

    def forward() -> None:
        steps: Any = engine._scheduler._steps
        nested = steps.run("replay", contextvars.copy_context(), lambda step: pytest.fail("ran a nested step"))
        asyncio.run_coroutine_threadsafe(nested, loop).result(PATIENCE_S)

    ways = {"a bare scope": bare_scope, "a forward": forward}

    async with expertstream.open(TINY, **quiet(slots="50%"), routing=enter) as engine:
        assert len(await generated(engine)) == 3
        assert [(error.open_kind, error.open_index, error.refused_kind) for error in caught] == [("paged", 1, "replay")]
        assert (engine.statistics().steps, engine.statistics().steps_failed) == (3, 0)
