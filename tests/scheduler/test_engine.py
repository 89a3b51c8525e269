"""The engine as an application uses it: tokens, requests, closing, errors."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import pytest
from tiny import PROMPT, TINY, greedy, quiet, tokenizer

import expertstream
from expertstream.scheduler.errors import RequestTooLongError

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
        with pytest.raises(expertstream.PromptError, match="token id 2048; the vocabulary has 2048"):
            await tokens_of(engine, [1, 2048])
        with pytest.raises(ValueError, match="no chat template"):
            await tokens_of(engine, [{"role": "user", "content": "hi"}])
        with pytest.raises(expertstream.PromptError, match="prompt has no tokens"):
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
            asyncio.run_coroutine_threadsafe(calls[what](), loop).result(10)
        except expertstream.NestedStepError as exc:
            refused.append(exc)

    loop = asyncio.get_running_loop()
    async with expertstream.open(TINY, **quiet(slots="50%"), routing=hook) as engine:
        assert await tokens_of(engine) == greedy()[:NUM_TOKENS]
        assert "must not nest" in str(refused[0])
        assert engine.statistics().steps == NUM_TOKENS
