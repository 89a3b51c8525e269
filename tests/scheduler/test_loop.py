"""The scheduler seen through the engine: its order, its warnings, and what everybody gets when it fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tiny import PROMPT, TINY, quiet

import expertstream
from expertstream.scheduler import loop as loop_module

pytestmark = pytest.mark.anyio


async def tokens_of(engine: expertstream.Engine, num_tokens: int, prompt: str = PROMPT) -> list[int]:
    return [token.id async for token in engine.generate(prompt, max_tokens=num_tokens)]


def warnings_in(arguments: dict[str, Any]) -> list[str]:
    entries = [json.loads(line) for line in arguments["log_stream"].getvalue().splitlines()]
    return [entry["code"] for entry in entries if entry["event"] == "warning"]


async def test_requests_run_in_the_order_they_came() -> None:
    """One request is computed at a time; the others wait in the order they came."""
    ended: list[int] = []

    async def request(number: int) -> None:
        await tokens_of(engine, 3)
        ended.append(number)

    async with expertstream.open(TINY, **quiet(slots="50%")) as engine:
        await asyncio.gather(*(request(number) for number in range(4)))
    assert ended == [0, 1, 2, 3]


async def test_decode_step_below_the_working_set_is_warned_of_once() -> None:
    """Contract 2.8: drafts verified in one step may want more experts than there are slots: said once."""
    arguments = quiet(slots=4, speculate=3)
    looping = "class TestQueue(unittest.TestCase):\n    def setUp(self):\n"  # its drafts are nearly all right
    async with expertstream.open(TINY, **arguments) as engine:
        assert len(await tokens_of(engine, 30, looping)) == 30
        assert engine.statistics().tokens_accepted > 5
    assert warnings_in(arguments) == ["slots.below_working_set"]


async def test_decode_step_that_wants_most_experts_is_warned_of_once() -> None:
    """Contract 2.8: so is one whose distinct experts exceed 80 % of a layer's."""
    arguments = quiet(slots="100%")
    async with expertstream.open(TINY, **arguments) as engine:
        store, scheduler = engine._opened.loaded.store, engine._scheduler
        for share in (0.8, 0.81, 0.9):
            store.widest_share = share
            scheduler.step_ended(_record(engine, waves=0))
    assert warnings_in(arguments) == ["residency.batch_is_wide"]


async def test_prefill_that_does_not_fit_is_not_warned_of() -> None:
    """Contract 2.8: in prefill waves are structural, and a decode step that fits has nothing to say."""
    arguments = quiet(slots=4)
    async with expertstream.open(TINY, **arguments) as engine:
        await tokens_of(engine, 4)
        assert engine.statistics().waves > 0
    assert warnings_in(arguments) == []


def _record(engine: expertstream.Engine, waves: int) -> Any:
    from expertstream.memory.outcome import Outcome

    ended: list[Any] = []
    clock = expertstream.StepClock(on_end=ended.append)
    with clock.step("paged") as step:
        step.count_tokens(decode=1)
        step.add(Outcome(waves=waves))
    return ended[0]


async def test_scheduler_that_fails_ends_every_request_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the scheduler itself reaches the running, the waiting and every later request as EngineDeadError."""

    async def broken(self: Any, work: object) -> None:
        raise ZeroDivisionError("planted")

    async with expertstream.open(TINY, **quiet(slots="50%")) as engine:
        monkeypatch.setattr(loop_module.Scheduler, "_serve", broken)
        results: list[Any] = await asyncio.gather(*(tokens_of(engine, 2) for _ in range(2)), return_exceptions=True)
        with pytest.raises(expertstream.EngineDeadError) as later:
            await tokens_of(engine, 2)
    for error in (*results, later.value):
        assert isinstance(error, expertstream.EngineDeadError)
        assert isinstance(error.__cause__, ZeroDivisionError)
