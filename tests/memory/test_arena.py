"""The host arena: read ahead, read first what is wanted, keep what is held, lose nothing to a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from expertstream.memory.arena import HostArena
from expertstream.memory.arena_space import ArenaSpace
from expertstream.memory.errors import ReadError
from expertstream.memory.outcome import Outcome
from expertstream.memory.reader import FileReader
from expertstream.memory.records import ExpertKey
from stores import WAIT_S, Records, ScriptedReader, open_arena, write_records

Required = tuple[Outcome, dict[ExpertKey, BaseException]]


def _keys(*experts: int, layer: int = 0) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


def _check(arena: HostArena, records: Records, keys: Sequence[ExpertKey]) -> None:
    for key in keys:
        views = records.layouts[key.layer].views(arena.record(key), 1)
        for name, value in records.expected[key].items():
            assert torch.equal(views[name][0], value), f"the record of {key} holds something else"


def _wait(arena: HostArena) -> None:
    with arena._changed:
        assert arena._changed.wait_for(lambda: not arena._background and not arena._reading, WAIT_S)


def _wait_until_urgent(arena: HostArena, key: ExpertKey) -> None:
    with arena._changed:
        assert arena._changed.wait_for(lambda: key in arena._urgent, WAIT_S)


@contextmanager
def _requiring(arena: HostArena, keys: Sequence[ExpertKey]) -> Iterator[list[Required]]:
    """Requires keys on a thread of its own, and joins it at the end."""
    results: list[Required] = []
    thread = threading.Thread(target=lambda: results.append(arena.require(keys)), daemon=True)
    thread.start()
    yield results
    thread.join(WAIT_S)
    assert not thread.is_alive(), "require did not return"


@pytest.mark.parametrize("num_threads", [1, 4])
def test_arena_of_every_expert_is_filled_in_the_background(tmp_path: Path, num_threads: int) -> None:
    """Every expert's record is read once, ahead of need; requiring it then reads nothing."""
    records = write_records(tmp_path, {0: 6, 1: 6})
    reader = ScriptedReader()
    with open_arena(records, reader=reader, num_threads=num_threads) as arena:
        _wait(arena)
        assert arena.is_complete
        assert arena.num_resident == 12
        keys = list(records.sources)
        assert arena.require(keys) == (Outcome(), {})
        _check(arena, records, keys)
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
        with _requiring(arena, _keys(6, 4)) as results:
            _wait_until_urgent(arena, ExpertKey(0, 4))
            reader.gate.set()
        outcome, errors = results[0]
        assert outcome == Outcome(reads=2, bytes_disk=2 * records.sources[ExpertKey(0, 6)].num_bytes)
        assert not errors
        _check(arena, records, _keys(6, 4))
        _wait(arena)
        assert [key.expert for key in reader.order] == [0, 6, 4, 1, 2, 3, 5, 7]


def test_expert_that_is_being_read_is_not_read_twice(tmp_path: Path) -> None:
    """Contract 2.6: wanting what is on its way waits for it, and counts as a read on demand."""
    records, reader = write_records(tmp_path, {0: 2}), ScriptedReader()
    reader.gate.clear()
    with open_arena(records, reader=reader) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with _requiring(arena, _keys(0)) as results, arena._changed:
            assert arena._changed.wait_for(lambda: ExpertKey(0, 0) in arena._holds, WAIT_S)
            reader.gate.set()
        assert results[0][0].reads == 1
        _wait(arena)
        assert [key.expert for key in reader.order] == [0, 1]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_arena_smaller_than_the_experts_serves_them_all(tmp_path: Path, num_threads: int) -> None:
    """With fewer places than experts cold ones are read again, counted in reads and bytes, and always right."""
    records, random = write_records(tmp_path, {0: 10}), Random(0)
    size = records.sources[ExpertKey(0, 0)].num_bytes
    with open_arena(records, places=4, num_threads=num_threads) as arena:
        _wait(arena)
        assert arena.max_held(0) == 4
        assert arena.num_resident == 4
        lru, total = [key.expert for key in _keys(0, 1, 2, 3)], Outcome()
        arena.release(_keys(0, 1, 2, 3) if not arena.require(_keys(0, 1, 2, 3))[1] else [])
        for _ in range(200):
            wanted = random.sample(range(10), random.randrange(1, 5))
            absent = [expert for expert in wanted if expert not in lru]
            outcome, errors = arena.require(_keys(*wanted))
            assert not errors
            _check(arena, records, _keys(*wanted))
            assert outcome == Outcome(reads=len(absent), bytes_disk=len(absent) * size)
            arena.release(_keys(*wanted))
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
        _wait(arena)
        for expert in (0, 1, 2, 0, 5):
            arena.require(_keys(expert))
            arena.release(_keys(expert))
        assert set(arena._place) == set(_keys(0, 2, 5))


def test_record_that_a_copy_reads_is_not_evicted(tmp_path: Path) -> None:
    """A held record keeps its place and its bytes until it is released; who needs the place waits."""
    records = write_records(tmp_path, {0: 5})
    with open_arena(records, places=2) as arena:
        _wait(arena)
        arena.require(_keys(0))
        arena.require(_keys(3))
        arena.release(_keys(3))
        arena.require(_keys(4))
        _check(arena, records, _keys(0, 4))
        with _requiring(arena, _keys(2)) as results:
            _wait_until_urgent(arena, ExpertKey(0, 2))
            _check(arena, records, _keys(0, 4))
            assert not results
            arena.release(_keys(4))
        assert results[0][0].reads == 1
        _check(arena, records, _keys(0, 2))


def test_failed_read_is_delivered_to_who_wants_it_and_a_retry_works(tmp_path: Path) -> None:
    """Contract 2.7: a read error names file and offset, holds nothing, loses no place and no other record."""
    records, reader = write_records(tmp_path, {0: 4}), ScriptedReader()
    reader.failing = {ExpertKey(0, 2)}
    with open_arena(records, reader=reader) as arena:
        _wait(arena)
        assert arena.num_resident == 3
        for _ in range(2):
            outcome, errors = arena.require(_keys(1, 2))
            assert outcome == Outcome()
            assert list(errors) == _keys(2)
            error = errors[ExpertKey(0, 2)]
            assert isinstance(error, ReadError)
            assert (error.file, error.offset) == (tmp_path / "0-2.bin", 0)
            arena.release(_keys(1))
            assert not arena._holds
        reader.failing.clear()
        assert arena.require(_keys(2))[0].reads == 1
        _check(arena, records, _keys(2))
        assert arena.num_resident == 4


def test_file_that_was_cut_fails_with_what_arrived_and_works_once_it_is_whole(tmp_path: Path) -> None:
    """Contract 2.7: a short read says how much was asked and how much there was."""
    records = write_records(tmp_path, {0: 2})
    file = tmp_path / "0-1.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:200])
    with open_arena(records) as arena:
        _wait(arena)
        error = arena.require(_keys(1))[1][ExpertKey(0, 1)]
        assert isinstance(error, ReadError)
        assert (error.offset, error.asked, error.got) == (192, 96, 8)
        with file.open("r+b") as handle:
            handle.write(whole)
        assert not arena.require(_keys(1))[1]
        _check(arena, records, _keys(1))


def test_failed_read_reaches_everybody_who_waits_for_it(tmp_path: Path) -> None:
    """Two that want the same record both learn that it cannot be read."""
    records, reader = write_records(tmp_path, {0: 2}), ScriptedReader()
    reader.failing = {ExpertKey(0, 0)}
    reader.gate.clear()
    with open_arena(records, reader=reader) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with _requiring(arena, _keys(0)) as first, _requiring(arena, _keys(0)) as second:
            with arena._changed:
                assert arena._changed.wait_for(lambda: arena._holds.get(ExpertKey(0, 0)) == 2, WAIT_S)
            reader.gate.set()
        assert list(first[0][1]) == list(second[0][1]) == _keys(0)
        assert not arena._holds


def test_close_wakes_who_waits(tmp_path: Path) -> None:
    """Closing while somebody waits for a record ends the wait with an error, and no thread is left."""
    records, reader = write_records(tmp_path, {0: 4}), ScriptedReader()
    reader.gate.clear()
    before = threading.active_count()
    with open_arena(records, reader=reader, num_threads=2) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with _requiring(arena, _keys(3)) as results:
            with arena._changed:
                assert arena._changed.wait_for(lambda: ExpertKey(0, 3) in arena._holds, WAIT_S)
            closing = threading.Thread(target=arena.close)
            closing.start()
            with arena._changed:
                assert arena._changed.wait_for(lambda: arena._is_closed, WAIT_S)
            reader.gate.set()
        closing.join(WAIT_S)
        assert list(results[0][1]) == _keys(3)
        assert "closed" in str(results[0][1][ExpertKey(0, 3)])
        assert not arena._holds
        arena.close()
    assert threading.active_count() == before


def test_close_of_an_arena_that_never_started_returns(tmp_path: Path) -> None:
    """An arena whose opening failed is closed like any other."""
    with open_arena(write_records(tmp_path, {0: 1}), is_started=False) as arena:
        assert arena.num_resident == 0


@pytest.mark.parametrize("places", [3, 10])
def test_places_of_mixed_record_sizes_are_apart(tmp_path: Path, places: int) -> None:
    """Layers whose records differ in size share the arena without evicting one another."""
    dtypes = {1: torch.bfloat16, 3: torch.bfloat16}
    records = write_records(tmp_path, dict.fromkeys(range(4), 5), dtypes=dtypes)
    small, large = records.layouts[1].num_bytes, records.layouts[0].num_bytes
    assert small < large
    with open_arena(records, places=places) as arena:
        _wait(arena)
        assert arena.num_bytes == places * (small + large)
        for layer in (0, 1, 2, 3):
            keys = _keys(0, 1, 2, layer=layer)
            assert not arena.require(keys)[1]
            _check(arena, records, keys)
            arena.release(keys)
        arena.release([] if arena.require(_keys(4, layer=0))[1] else _keys(4, layer=0))
        with arena._changed:
            assert {key.layer for key in arena._place if key.layer in dtypes} >= {3}


def test_urgent_record_in_a_place_of_one_size_leaves_other_sizes_to_be_read_ahead(tmp_path: Path) -> None:
    """A wanted expert that takes the place of one to be read ahead costs that one only its turn."""
    records, reader = write_records(tmp_path, {0: 6, 1: 6}, dtypes={1: torch.bfloat16}), ScriptedReader()
    large, small = records.layouts[0].num_bytes, records.layouts[1].num_bytes
    reader.gate.clear()
    with open_arena(records, places={large: 2, small: 3}, reader=reader) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with _requiring(arena, _keys(5)):
            _wait_until_urgent(arena, ExpertKey(0, 5))
            reader.gate.set()
        _wait(arena)
        assert reader.order == [*_keys(0, 5), *_keys(0, 1, 2, layer=1)]
        assert arena.num_resident == 5


def test_background_reading_evicts_nobody(tmp_path: Path) -> None:
    """Reading ahead takes free places only, also while a wanted record waits for a place of its own."""
    records, reader = write_records(tmp_path, {0: 3, 1: 4}, dtypes={1: torch.bfloat16}), ScriptedReader()
    large, small = records.layouts[0].num_bytes, records.layouts[1].num_bytes
    with open_arena(records, places={large: 1, small: 2}, reader=reader) as arena:
        _wait(arena)
        arena.require(_keys(0))
        with _requiring(arena, _keys(1)):
            _wait_until_urgent(arena, ExpertKey(0, 1))
            with arena._changed:  # as if two more were to be read ahead
                arena._background.extend(_keys(2, 3, layer=1))
                arena._changed.notify_all()
            _wait(arena)
            assert {key for key in arena._place if key.layer == 1} == set(_keys(0, 1, layer=1))
            arena.release(_keys(0))


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
    with _requiring(arena, _keys(4)):
        _wait_until_urgent(arena, ExpertKey(0, 4))
        reader.gate.set()
    _wait(arena)
    arena.close()
    reader.close()
    assert seen == [(count * num_bytes, 5 * num_bytes) for count in range(1, 6)]


def test_initial_choice_is_an_equal_share_of_every_layer_in_the_order_of_the_layers(tmp_path: Path) -> None:
    """What is read ahead serves every layer alike, the first layers first, whatever their record sizes."""
    records = write_records(tmp_path, dict.fromkeys(range(4), 4), dtypes={0: torch.float32, 2: torch.bfloat16})
    large, small = records.layouts[0].num_bytes, records.layouts[2].num_bytes
    places: Mapping[int, int] = {small: 2, large: 6}
    space = ArenaSpace(torch.zeros(2 * small + 6 * large, dtype=torch.uint8), places)
    chosen = space.choose_initial(records.sources, records.layouts)
    assert chosen == [*_keys(0, 1), *_keys(0, 1, layer=1), *_keys(0, 1, layer=2), *_keys(0, 1, layer=3)]


def test_space_that_does_not_fit_its_block_is_refused() -> None:
    """One exact allocation: neither a byte more nor less than its places."""
    with pytest.raises(ValueError, match="arena block has 100 bytes; its places need 128"):
        ArenaSpace(torch.zeros(100, dtype=torch.uint8), {64: 2})


def test_places_of_a_space_are_conserved_and_do_not_overlap() -> None:
    """Over 10,000 random takes and returns: taken plus free are the places, and no two share a byte."""
    random, places = Random(0), {64: 5, 192: 3}
    block = torch.zeros(64 * 5 + 192 * 3, dtype=torch.uint8)
    space, taken = ArenaSpace(block, places), list[tuple[int, int]]()
    for _ in range(10_000):
        size = random.choice([64, 192])
        if random.random() < 0.5 and taken:
            space.give_back(*taken.pop(random.randrange(len(taken))))
        else:
            place = space.take_free(size)
            held = sum(each == size for each, _ in taken)
            assert (place is None) == (held == places[size])
            taken += [] if place is None else [(size, place)]
        assert len(set(taken)) == len(taken)
    for index, (size, place) in enumerate(taken):
        space.record(size, place).fill_(index + 1)
    assert all(bool((space.record(size, place) == index + 1).all()) for index, (size, place) in enumerate(taken))


def test_plain_reader_fills_an_arena_with_several_threads(tmp_path: Path) -> None:
    """Many threads on one arena read each record once and right."""
    records = write_records(tmp_path, {0: 40})
    with open_arena(records, reader=FileReader(), num_threads=4) as arena:
        assert not arena.require(list(records.sources))[1]
        _check(arena, records, list(records.sources))
