"""Every counter of a real engine against a count made from what the routing hook saw, by other means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from routing import MTP, Replay, Routing
from stores import ScriptedReader, open_store
from tiny import NUM_EXPERTS, PROMPT, TINY, TOP_K, quiet

import expertstream
from expertstream.kernels.runtime import CopyError
from expertstream.kernels.scripted import ScriptedCopy, ScriptedRuntime
from expertstream.memory.errors import ReadError
from expertstream.memory.reader import FileReader
from expertstream.memory.records import ExpertKey
from expertstream.steps.statistics import Statistics

pytestmark = pytest.mark.anyio

IDS = [5, 6, 7, 900]
"""With 4 rows of top-4 no look-up wants more than 16 experts: at 50 % of 32 each fits at once."""

PATIENCE_S = 20.0


async def generated(engine: expertstream.Engine, prompt: Any, num_tokens: int) -> list[int]:
    return [token.id async for token in engine.generate(prompt, max_tokens=num_tokens)]


async def host_memory_is_filled(engine: expertstream.Engine) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not engine._opened.loaded.arena.is_complete:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("settings", "prompt", "slots"),
    [
        ({"slots": "50%"}, IDS, 16),
        ({"slots": "50%", "speculate": 3}, IDS, 16),
        ({"slots": 5, "speculate": 2}, PROMPT, 5),
        ({"slots": "25%"}, [7 + 3 * number for number in range(60)], 8),
    ],
    ids=["decoding", "drafting", "waves", "scan"],
)
async def test_residency_counters_equal_an_independent_replay_of_the_routing(
    settings: dict[str, Any], prompt: str | list[int], slots: int
) -> None:
    """Contract 3.2: lookups, hits, misses, fills, evictions, waves and bytes are those of a textbook cache."""
    routing, replay = Routing(), Replay(slots)
    async with expertstream.open(TINY, **quiet(**settings), routing=routing) as engine:
        engine._opened.on_step.append(routing.ended)
        await generated(engine, prompt, 12)
        facts: Mapping[str, Any] = engine.facts
        (record_bytes,) = facts["record_bytes"]
        got = engine.statistics()
    replay.run(routing.steps)
    assert got.lookups == replay.lookups
    # With few slots a step may want an expert again that another of its rows has evicted.
    assert (got.lookups == routing.num_lookups()) if slots > 5 else (got.lookups >= routing.num_lookups())
    assert (got.hits, got.misses, got.fills) == (replay.hits, replay.fills, replay.fills)
    assert (got.evictions, got.waves, got.bytes) == (replay.evictions, replay.waves, replay.fills * record_bytes)
    assert min(got.hits, got.evictions, got.fills) > 0
    assert (got.waves > 0) == (slots < 16)
    assert (got.fills_failed, got.exhausted, got.joins, got.forced) == (0, 0, 0, 0)
    assert got.violations() == []


@pytest.mark.parametrize("k", [0, 1, 3])
async def test_steps_and_tokens_equal_what_was_computed(k: int) -> None:
    """Contract 1.1, 3.2: an iteration is its k drafts and one verification; rows are counted by phase."""
    num_tokens, routing = 30, Routing()
    async with expertstream.open(TINY, **quiet(slots="100%", speculate=k), routing=routing) as engine:
        engine._opened.on_step.append(routing.ended)
        num_prompt = len(await engine.tokenize(PROMPT))
        assert len(await generated(engine, PROMPT, num_tokens)) == num_tokens
        await engine.logits(IDS)
        got = engine.statistics()
        age = engine._opened.loaded.store.age
    prefill, *verified, dense = routing.rows(0)
    assert (prefill, dense) == (num_prompt, len(IDS))
    shape = "".join("d" if step[0][0] == MTP else "v" for step in routing.steps[1:-2])
    per_iteration = [len(drafts) for drafts in shape.split("v")[:-1]]
    # All but the last few iterations, which the limit cuts short, draft k tokens.
    assert per_iteration[: -k or None].count(k) >= len(verified) - max(1, k)
    assert got.steps_by_kind == {"paged": 1 + len(verified), "draft": shape.count("d"), "dense": 1, "replay": 0}
    assert (got.steps, got.steps_failed) == (2 + len(shape), 0)
    assert (got.tokens_prefill, got.tokens_decode) == (num_prompt, sum(verified))
    assert got.tokens_drafted == shape.count("d") == sum(per_iteration)
    # The prefill gives one token, every verification one more than it accepts.
    assert got.tokens_accepted == num_tokens - 1 - len(verified)
    assert (got.tokens_accepted > 0) == (k > 0)
    assert age == got.steps_by_kind["paged"]


async def test_drafts_of_a_prompt_in_chunks_are_not_proposals() -> None:
    """Contract 3.2: the head's own pass over a prompt's chunks is a step and drafts nothing."""
    routing = Routing()
    prompt = list(range(100, 140))
    async with expertstream.open(TINY, **quiet(slots="100%", speculate=1, prefill_chunk=16), routing=routing) as engine:
        engine._opened.on_step.append(routing.ended)
        await generated(engine, prompt, 5)
        got = engine.statistics()
    assert (got.tokens_prefill, got.steps_by_kind["draft"]) == (40, len(routing.rows(MTP)))
    assert got.tokens_drafted == got.steps_by_kind["draft"] - 2


async def test_rows_that_ask_for_experts_are_the_tokens_computed_and_drafts_change_no_token() -> None:
    """Contract 2.9, 3.2: a decode look-up has one row per token computed and none of padding."""
    plain, drafted = Routing(), Routing()
    async with expertstream.open(TINY, **quiet(slots="50%"), routing=plain) as engine:
        engine._opened.on_step.append(plain.ended)
        expected = await generated(engine, PROMPT, 20)
    assert set(plain.rows(0)[1:]) == {1}
    assert all(len(row) == TOP_K and max(row) < NUM_EXPERTS for _, rows in plain.calls for row in rows)
    async with expertstream.open(TINY, **quiet(slots="50%", speculate=2), routing=drafted) as engine:
        engine._opened.on_step.append(drafted.ended)
        assert await generated(engine, PROMPT, 20) == expected
    assert set(drafted.rows(0)[1:]) <= {1, 2, 3}


async def test_durations_are_within_what_was_measured_outside_and_around_what_was_seen_inside() -> None:
    """Contract 1.5, 3.2: a step is longer than its look-ups and shorter than the call; the loop's share is the rest."""
    routing = Routing()
    async with expertstream.open(TINY, **quiet(slots="50%"), routing=routing) as engine:
        started_ns = time.perf_counter_ns()
        await engine.logits([7 + 3 * number for number in range(400)])
        outside_ns = time.perf_counter_ns() - started_ns
        got = engine.statistics()
    inside_ns = routing.told_ns[-1] - routing.told_ns[0]
    assert inside_ns < got.step_ns <= outside_ns
    assert 0 < got.host_ns <= got.step_ns - inside_ns
    assert 0 < got.stall_ns < got.step_ns
    assert got.copy_ns > 0
    assert got.violations() == []


def test_stall_and_copy_time_are_those_of_the_waits_and_the_copies(tmp_path: Path) -> None:
    """Contract 3.2: the stall is what the waits took, and the copy time what the copies themselves took."""

    def wait(copy: ScriptedCopy) -> None:
        copy.finish()
        copy.stall_ns, copy.copy_ns = 1000, 7

    with open_store(tmp_path, runtime=ScriptedRuntime(on_wait=wait)) as tiny:
        tiny.serve([0, 1, 2])
        assert (tiny.last.fills, tiny.last.stall_ns, tiny.last.copy_ns) == (3, 3000, 21)
        tiny.serve([0, 1, 2])
        assert (tiny.last.hits, tiny.last.stall_ns, tiny.last.copy_ns) == (3, 0, 0)


async def test_reads_from_disk_equal_what_the_reader_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 3.2: with a part of the experts on disk only, `reads` and `bytes_disk` are those of the files."""
    sizes: list[int] = []
    read_into = FileReader.read_into

    def counting(self: FileReader, file: Path, offset: int, buffer: Any) -> int:
        sizes.append(read_into(self, file, offset, buffer))
        return sizes[-1]

    async with expertstream.open(TINY, **quiet(slots="50%", host_memory="30%")) as engine:
        await host_memory_is_filled(engine)
        monkeypatch.setattr(FileReader, "read_into", counting)
        await generated(engine, IDS, 8)
        got, loaded = engine.statistics(), engine._opened.loaded
        source = next(iter(loaded.arena._sources.values()))
    assert got.reads == len(sizes) // len(source.pieces) > 0
    assert got.bytes_disk == sum(sizes) == got.reads * source.num_bytes
    assert got.fills > got.reads


async def test_step_whose_read_fails_is_counted_once_and_so_is_each_failed_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contract 2.7, 3.2: the step fails, `fills_failed` are the fills that did, and the same request then works."""
    async with expertstream.open(TINY, **quiet(slots="50%", host_memory="30%")) as engine:
        await host_memory_is_filled(engine)

        def refuse(*_: Any) -> int:
            raise OSError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(FileReader, "read_into", refuse)
            with pytest.raises(OSError, match="planted"):
                await generated(engine, IDS, 2)
        failed = engine.statistics()
        assert (failed.steps, failed.steps_failed, failed.tokens_prefill) == (1, 1, 0)
        assert failed.fills_failed == failed.misses - failed.fills > 0
        assert failed.violations() == []
        assert len(await generated(engine, IDS, 2)) == 2
        assert (engine.statistics() - failed).fills_failed == 0


def test_failed_reads_of_a_pass_are_counted_one_by_one(tmp_path: Path) -> None:
    """Contract 2.7, 3.2: of five fills, two of which fail, three are fills with their bytes and two are failed."""
    reader = ScriptedReader()
    reader.failing = {ExpertKey(0, 1), ExpertKey(0, 3)}
    with open_store(tmp_path, num_slots=6, reader=reader) as tiny:
        with pytest.raises(ReadError, match="the test says so"):
            tiny.serve([0, 1, 2, 3, 4])
        assert (tiny.last.misses, tiny.last.fills, tiny.last.fills_failed) == (5, 3, 2)
        assert tiny.last.bytes == 3 * tiny.records.layouts[0].num_bytes
        assert tiny.residents() == {0, 2, 4}


def test_failed_copies_of_a_pass_move_no_bytes_and_are_no_fills(tmp_path: Path) -> None:
    """Contract 2.7, 3.2: of three copies, one of which fails, two are fills with their bytes and one is failed."""

    def fail_the_second(copy: ScriptedCopy) -> None:
        if copy is runtime.copies[1]:
            copy.fail(OSError("link down"))
        else:
            copy.finish()

    runtime = ScriptedRuntime(on_wait=fail_the_second)
    with open_store(tmp_path, runtime=runtime) as tiny:
        with pytest.raises(CopyError, match="link down"):
            tiny.serve([0, 1, 2])
        assert (tiny.last.misses, tiny.last.fills, tiny.last.fills_failed) == (3, 2, 1)
        assert tiny.last.bytes == 2 * tiny.records.layouts[0].num_bytes
        assert tiny.residents() == {0, 2}
        assert "0 held" in repr(tiny.arena)


async def test_totals_only_grow_from_step_to_step() -> None:
    """Contract 3.1: at every step's end each counter is at least what it was, and the record reconciles."""
    seen: list[Statistics] = [Statistics.zero()]
    async with expertstream.open(TINY, **quiet(slots=5, speculate=2)) as engine:
        engine._opened.on_step.append(lambda record: seen.append(engine.statistics()))
        await generated(engine, PROMPT, 12)
        await engine.logits(PROMPT)
    assert [later.steps - earlier.steps for earlier, later in pairwise(seen)] == [1] * (len(seen) - 1)
    for earlier, later in pairwise(seen):
        assert later.violations_since(earlier) == []
        assert later.violations() == []
