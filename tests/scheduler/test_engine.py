"""The engine as an application uses it: tokens, requests, closing, errors."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tiny import PROMPT, TINY, greedy, quiet, tokenizer

import expertstream
from expertstream.scheduler.errors import EngineClosedError, RequestTooLongError, WrongLoopError

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


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 4},
        {"slots": "25%"},
        {"slots": "50%", "policy": "lrfu"},
        {"slots": "100%"},
        {"slots": 5, "speculate": 1},
        {"slots": "50%", "speculate": 3},
        {"slots": "50%", "host_memory": "30%"},
        {"slots": "3MB", "prefill_chunk": 16},
    ],
    ids=str,
)
async def test_generate_gives_the_tokens_of_plain_transformers(settings: dict[str, object]) -> None:
    """Contract 2.9: with greedy sampling the tokens are the same whatever is resident, in float32 also with drafts."""
    async with expertstream.open(TINY, **quiet(**settings)) as engine:
        assert await tokens_of(engine) == greedy()[:NUM_TOKENS]
        assert engine.statistics().violations() == []
        nothing_is_held(engine)


async def test_generate_streams_the_text_of_its_tokens() -> None:
    """The texts of the tokens add up to what the tokenizer makes of them; the last token says why it is the last."""
    async with expertstream.open(TINY, **quiet(slots="100%")) as engine:
        tokens = [token async for token in engine.generate(PROMPT, max_tokens=NUM_TOKENS)]
    assert "".join(token.text for token in tokens) == tokenizer().decode([token.id for token in tokens])
    assert [token.index for token in tokens] == list(range(NUM_TOKENS))
    assert [token.finish_reason for token in tokens] == [None] * (NUM_TOKENS - 1) + ["length"]


async def test_generate_stops_at_an_end_token() -> None:
    """A token that the generation config names as an end token is the last, without text."""
    async with expertstream.open(TINY, **quiet(slots="100%")) as engine:
        stop = greedy()[5]
        engine._opened.loaded = _with_end_ids(engine._opened.loaded, frozenset([stop]))
        engine._scheduler._loaded = engine._opened.loaded
        tokens = [token async for token in engine.generate(PROMPT, max_tokens=NUM_TOKENS)]
    assert [token.id for token in tokens] == greedy()[: greedy().index(stop) + 1]
    assert (tokens[-1].finish_reason, tokens[-1].text) == ("stop", "")


def _with_end_ids(loaded: Any, end_ids: frozenset[int]) -> Any:
    import dataclasses

    return dataclasses.replace(loaded, end_ids=end_ids)


async def test_generate_takes_token_ids_as_well_as_text() -> None:
    """A prompt of token ids gives the same tokens as the text it came from."""
    async with expertstream.open(TINY, **quiet(slots="100%")) as engine:
        ids = await engine.tokenize(PROMPT)
        assert ids == tokenizer()(PROMPT)["input_ids"]
        assert await tokens_of(engine, ids) == greedy()[:NUM_TOKENS]


async def test_generate_refuses_arguments_it_cannot_use() -> None:
    """A wrong argument is refused before anything is queued, with its name and value."""
    async with expertstream.open(TINY, **quiet(slots="100%")) as engine:
        bad: list[tuple[Any, Any, type[Exception], str]] = [
            (PROMPT, 0, ValueError, "max_tokens must be at least 1, not 0"),
            (PROMPT, "7", TypeError, "max_tokens must be an int, not str"),
            (b"bytes", 3, TypeError, "prompt must be text"),
            ([], 3, TypeError, "prompt must be text"),
            ([{"role": "user"}], 3, TypeError, "role and content"),
        ]
        for prompt, max_tokens, kind, message in bad:
            with pytest.raises(kind, match=message):
                engine.generate(prompt, max_tokens=max_tokens)
        with pytest.raises(ValueError, match="token id 2048; the vocabulary has 2048"):
            await tokens_of(engine, [1, 2048])
        with pytest.raises(ValueError, match="no chat template"):
            await tokens_of(engine, [{"role": "user", "content": "hi"}])
        with pytest.raises(ValueError, match="prompt has no tokens"):
            await tokens_of(engine, "")
        assert engine.statistics().steps == 0


async def test_generate_refuses_a_prompt_that_leaves_no_room() -> None:
    """A prompt as long as the longest request is refused with both figures; one token shorter gives one token."""
    async with expertstream.open(TINY, **quiet(slots="100%", max_model_len=32)) as engine:
        with pytest.raises(RequestTooLongError, match="prompt of 32 tokens: a request has at most 32"):
            await tokens_of(engine, [7] * 32)
        assert len(await tokens_of(engine, [7] * 31)) == 1
        nothing_is_held(engine)


async def test_two_generations_at_once_are_queued_and_both_right() -> None:
    """Contract 1.3: two tasks that each want a forward are queued, never refused and never overlapped."""
    async with expertstream.open(TINY, **quiet(slots="50%")) as engine:
        results = await asyncio.gather(*(tokens_of(engine) for _ in range(3)), engine.logits(PROMPT))
    assert results[:3] == [greedy()[:NUM_TOKENS]] * 3
    assert engine.statistics().steps_by_kind == {"paged": 3 * NUM_TOKENS, "draft": 0, "dense": 1, "replay": 0}


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


async def test_closing_in_the_middle_of_a_step_ends_the_step_once_and_the_request_with_an_error() -> None:
    """Contract 1.4: shutdown in the middle of a step ends it once, and who waits for tokens learns of it."""
    entered, go_on = threading.Event(), threading.Event()

    def hook(layer: int, experts: list[list[int]]) -> None:
        entered.set()
        go_on.wait(10)

    engine = await expertstream.open(TINY, **quiet(slots="50%"), routing=hook)
    task = asyncio.create_task(tokens_of(engine))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0.01)
    go_on.set()
    await closing
    with pytest.raises(EngineClosedError):
        await task
    statistics = engine.statistics()
    assert (statistics.steps, statistics.steps_failed) == (1, 1)
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


async def test_a_step_that_raises_fails_its_request_only() -> None:
    """Contract 1.4: a step that raises ends once and is counted; the next one is correct, nothing resident is lost."""
    fail = [False]

    def hook(layer: int, experts: list[list[int]]) -> None:
        if fail[0] and layer == 5:
            raise OSError("planted")

    async with expertstream.open(TINY, **quiet(slots="50%"), routing=hook) as engine:
        assert await tokens_of(engine) == greedy()[:NUM_TOKENS]
        fail[0] = True
        with pytest.raises(OSError, match="planted"):
            await tokens_of(engine)
        fail[0] = False
        statistics = engine.statistics()
        assert (statistics.steps, statistics.steps_failed) == (NUM_TOKENS + 1, 1)
        assert await tokens_of(engine) == greedy()[:NUM_TOKENS]
        assert engine.statistics().violations() == []
        nothing_is_held(engine)


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


async def test_two_engines_in_one_loop_have_their_own_stores_and_clocks() -> None:
    """Contract 2.4: two models in one process have their own stores, counters and clocks."""
    async with (
        expertstream.open(TINY, **quiet(slots="50%")) as first,
        expertstream.open(TINY, **quiet(slots="100%")) as second,
    ):
        one, two = await asyncio.gather(tokens_of(first), tokens_of(second, num_tokens=5))
        assert (one, two) == (greedy()[:NUM_TOKENS], greedy()[:5])
        assert (first.statistics().steps, second.statistics().steps) == (NUM_TOKENS, 5)
        assert first.facts["store"] != second.facts["store"]


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


async def test_configure_changes_what_does_not_latch_and_refuses_the_rest_by_name() -> None:
    """Contract 5.4: a setting fixed at open refuses a different later value and accepts an equal one."""
    log = io.StringIO()
    async with expertstream.open(TINY, slots="50%", stats_every=0, stats_min_s=0, log_stream=log) as engine:
        await tokens_of(engine, num_tokens=4)
        assert '"event": "statistics"' not in log.getvalue()
        engine.configure(stats_every=2, slots="50%")
        await tokens_of(engine, num_tokens=4)
        assert log.getvalue().count('"event": "statistics"') == 2
        with pytest.raises(expertstream.SettingError, match=r"slots.*latched at open"):
            engine.configure(slots="25%")


@pytest.mark.parametrize("what", ["generate", "logits", "replay", "tokenize"])
async def test_a_forward_that_a_hook_waits_for_is_refused_instead_of_waiting_for_itself(what: str) -> None:
    """Contract 1.3: a forward asked for from inside a hook is inside the open step, whatever asks for it."""
    import torch

    refused: list[BaseException] = []

    def hook(layer: int, experts: list[list[int]]) -> None:
        if refused:
            return
        calls: dict[str, Callable[[], Any]] = {
            "generate": lambda: tokens_of(engine),
            "logits": lambda: engine.logits(PROMPT),
            "replay": lambda: engine.replay_layer(0, torch.zeros(1, 128)),
            "tokenize": lambda: engine.tokenize(PROMPT),
        }
        try:
            asyncio.run_coroutine_threadsafe(calls[what](), loop).result(60)
        except expertstream.NestedStepError as exc:
            refused.append(exc)

    loop = asyncio.get_running_loop()
    async with expertstream.open(TINY, **quiet(slots="50%"), routing=hook) as engine:
        assert await tokens_of(engine) == greedy()[:NUM_TOKENS]
        assert "must not nest" in str(refused[0])
        assert engine.statistics().steps == NUM_TOKENS
