"""The host arena: read ahead, read first what is wanted, keep what is held."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from stores import (
    WAIT_S,
    ScriptedReader,
    check_records,
    keys,
    open_arena,
    requiring,
    wait_until_read_ahead,
    wait_until_urgent,
    write_records,
)

from expertstream.memory.arena import HostArena
from expertstream.memory.arena_space import ArenaSpace
from expertstream.memory.outcome import Outcome
from expertstream.memory.reader import FileReader
from expertstream.memory.records import ExpertKey


@pytest.mark.parametrize("num_threads", [1, 4])
def test_arena_of_every_expert_is_filled_in_the_background(tmp_path: Path, num_threads: int) -> None:
    """Every expert's record is read once, ahead of need; requiring it then reads nothing."""
    records = write_records(tmp_path, {0: 6, 1: 6})
    reader = ScriptedReader()
    with open_arena(records, reader=reader, num_threads=num_threads) as arena:
        wait_until_read_ahead(arena)
        assert arena.is_complete
        assert arena.num_resident == 12
        wanted = list(records.sources)
        assert arena.require(wanted) == (Outcome(), {})
        check_records(arena, records, wanted)
        assert arena.num_bytes == 12 * records.layouts[0].num_bytes
        assert "12 of 12 experts resident, 12 held, 0 being read" in repr(arena)
        if num_threads == 1:
            assert reader.order == sorted(records.sources)


def test_expert_wanted_before_its_turn_is_read_first(tmp_path: Path) -> None:
    """The first token does not wait for the last byte: a wanted expert is read next, and is counted."""
    records, reader = write_records(tmp_path, {0: 8}), ScriptedReader()
    reader.gate.clear()
    with open_arena(records, reader=reader) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with requiring(arena, keys(6, 4)) as results:
            wait_until_urgent(arena, ExpertKey(0, 4))
            reader.gate.set()
        outcome, errors = results[0]
        assert outcome == Outcome(reads=2, bytes_disk=2 * records.sources[ExpertKey(0, 6)].num_bytes)
        assert not errors
        check_records(arena, records, keys(6, 4))
        wait_until_read_ahead(arena)
        assert [key.expert for key in reader.order] == [0, 6, 4, 1, 2, 3, 5, 7]


def test_expert_that_is_being_read_is_not_read_twice(tmp_path: Path) -> None:
    """Contract 2.6: wanting what is on its way waits for it, and counts as a read on demand."""
    records, reader = write_records(tmp_path, {0: 2}), ScriptedReader()
    reader.gate.clear()
    with open_arena(records, reader=reader) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with requiring(arena, keys(0)) as results, arena._changed:
            assert arena._changed.wait_for(lambda: ExpertKey(0, 0) in arena._holds, WAIT_S)
            reader.gate.set()
        assert results[0][0].reads == 1
        wait_until_read_ahead(arena)
        assert [key.expert for key in reader.order] == [0, 1]


def test_expert_that_two_want_is_taken_by_one_reader(tmp_path: Path) -> None:
    """Contract 2.6: a second wish for what a reader has just begun starts no second read."""
    with open_arena(write_records(tmp_path, {0: 2}), is_started=False) as arena, arena._changed:
        arena._urgent.extend(keys(1, 1))
        task = arena._take()
        assert task is not None
        assert task[0] == ExpertKey(0, 1)
        assert arena._take_urgent() is None
        assert not arena._urgent


@pytest.mark.parametrize("num_threads", [1, 3])
def test_arena_smaller_than_the_experts_serves_them_all(tmp_path: Path, num_threads: int) -> None:
    """With fewer places than experts cold ones are read again, counted in reads and bytes, and always right."""
    records, random = write_records(tmp_path, {0: 10}), Random(0)
    size = records.sources[ExpertKey(0, 0)].num_bytes
    with open_arena(records, places=4, num_threads=num_threads) as arena:
        wait_until_read_ahead(arena)
        assert arena.max_held(0) == 4
        assert arena.num_resident == 4
        lru, total = [key.expert for key in keys(0, 1, 2, 3)], Outcome()
        arena.release(keys(0, 1, 2, 3) if not arena.require(keys(0, 1, 2, 3))[1] else [])
        for _ in range(200):
            wanted = random.sample(range(10), random.randrange(1, 5))
            absent = [expert for expert in wanted if expert not in lru]
            outcome, errors = arena.require(keys(*wanted))
            assert not errors
            check_records(arena, records, keys(*wanted))
            assert outcome == Outcome(reads=len(absent), bytes_disk=len(absent) * size)
            arena.release(keys(*wanted))
            with arena._changed:
                lru = [key.expert for key in arena._place]
            assert len(lru) <= 4
            assert set(wanted) <= set(lru)
            total += outcome
        assert total.reads > 100
        assert not arena._holds


def test_arena_evicts_the_least_recently_used_record(tmp_path: Path) -> None:
    """The record that was wanted longest ago makes room."""
    records, reader = write_records(tmp_path, {0: 6}), ScriptedReader()
    with open_arena(records, places=3, reader=reader) as arena:
        wait_until_read_ahead(arena)
        for expert in (0, 1, 2, 0, 5):
            arena.require(keys(expert))
            arena.release(keys(expert))
        assert set(arena._place) == set(keys(0, 2, 5))


def test_record_that_a_copy_reads_is_not_evicted(tmp_path: Path) -> None:
    """A held record keeps its place and its bytes until it is released; who needs the place waits."""
    records = write_records(tmp_path, {0: 5})
    with open_arena(records, places=2) as arena:
        wait_until_read_ahead(arena)
        arena.require(keys(0))
        arena.require(keys(3))
        arena.release(keys(3))
        arena.require(keys(4))
        check_records(arena, records, keys(0, 4))
        with requiring(arena, keys(2)) as results:
            wait_until_urgent(arena, ExpertKey(0, 2))
            check_records(arena, records, keys(0, 4))
            assert not results
            arena.release(keys(4))
        assert results[0][0].reads == 1
        check_records(arena, records, keys(0, 2))


@pytest.mark.parametrize("places", [3, 10])
def test_places_of_mixed_record_sizes_are_apart(tmp_path: Path, places: int) -> None:
    """Layers whose records differ in size share the arena without evicting one another."""
    dtypes = {1: torch.bfloat16, 3: torch.bfloat16}
    records = write_records(tmp_path, dict.fromkeys(range(4), 5), dtypes=dtypes)
    small, large = records.layouts[1].num_bytes, records.layouts[0].num_bytes
    assert small < large
    with open_arena(records, places=places) as arena:
        wait_until_read_ahead(arena)
        assert arena.num_bytes == places * (small + large)
        for layer in (0, 1, 2, 3):
            wanted = keys(0, 1, 2, layer=layer)
            assert not arena.require(wanted)[1]
            check_records(arena, records, wanted)
            arena.release(wanted)
        arena.release([] if arena.require(keys(4, layer=0))[1] else keys(4, layer=0))
        with arena._changed:
            assert {key.layer for key in arena._place if key.layer in dtypes} >= {3}


def test_urgent_record_in_a_place_of_one_size_leaves_other_sizes_to_be_read_ahead(tmp_path: Path) -> None:
    """A wanted expert that takes the place of one to be read ahead costs that one only its turn."""
    records, reader = write_records(tmp_path, {0: 6, 1: 6}, dtypes={1: torch.bfloat16}), ScriptedReader()
    large, small = records.layouts[0].num_bytes, records.layouts[1].num_bytes
    reader.gate.clear()
    with open_arena(records, places={large: 2, small: 3}, reader=reader) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with requiring(arena, keys(5)):
            wait_until_urgent(arena, ExpertKey(0, 5))
            reader.gate.set()
        wait_until_read_ahead(arena)
        assert reader.order == [*keys(0, 5), *keys(0, 1, 2, layer=1)]
        assert arena.num_resident == 5


def test_background_reading_evicts_nobody(tmp_path: Path) -> None:
    """Reading ahead takes free places only, also while a wanted record waits for a place of its own."""
    records, reader = write_records(tmp_path, {0: 3, 1: 4}, dtypes={1: torch.bfloat16}), ScriptedReader()
    large, small = records.layouts[0].num_bytes, records.layouts[1].num_bytes
    with open_arena(records, places={large: 1, small: 2}, reader=reader) as arena:
        wait_until_read_ahead(arena)
        arena.require(keys(0))
        with requiring(arena, keys(1)):
            wait_until_urgent(arena, ExpertKey(0, 1))
            with arena._changed:  # as if two more were to be read ahead
                arena._background.extend(keys(2, 3, layer=1))
                assert arena._take_background() is None
            assert {key for key in arena._place if key.layer == 1} == set(keys(0, 1, layer=1))
            arena.release(keys(0))


def test_progress_counts_to_all_bytes_to_be_read_ahead(tmp_path: Path) -> None:
    """Progress ends at its total, also when a wanted expert was read before its turn."""
    records, seen = write_records(tmp_path, {0: 5}), list[tuple[int, int]]()
    size, num_bytes = records.layouts[0].num_bytes, records.sources[ExpertKey(0, 0)].num_bytes
    space = ArenaSpace(torch.zeros(5 * size, dtype=torch.uint8), {size: 5})
    reader = ScriptedReader()
    reader.gate.clear()
    arena = HostArena(
        space, records.layouts, records.sources, reader, num_threads=1, on_progress=lambda *done: seen.append(done)
    )
    arena.start()
    with requiring(arena, keys(4)):
        wait_until_urgent(arena, ExpertKey(0, 4))
        reader.gate.set()
    wait_until_read_ahead(arena)
    arena.close()
    reader.close()
    assert seen == [(count * num_bytes, 5 * num_bytes) for count in range(1, 6)]


def test_plain_reader_fills_an_arena_with_several_threads(tmp_path: Path) -> None:
    """Many threads on one arena read each record once and right."""
    records = write_records(tmp_path, {0: 40})
    with open_arena(records, reader=FileReader(), num_threads=4) as arena:
        assert not arena.require(list(records.sources))[1]
        check_records(arena, records, list(records.sources))
