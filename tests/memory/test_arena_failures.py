"""What the host arena does with a read that fails, and when it is closed under somebody."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from stores import (
    WAIT_S,
    ScriptedReader,
    check_records,
    keys,
    open_arena,
    requiring,
    wait_until_read_ahead,
    write_records,
)

from expertstream.memory.errors import ReadError
from expertstream.memory.outcome import Outcome
from expertstream.memory.records import ExpertKey


def test_failed_read_is_delivered_to_who_wants_it_and_a_retry_works(tmp_path: Path) -> None:
    """Contract 2.7: a read error names file and offset, holds nothing, loses no place and no other record."""
    records, reader = write_records(tmp_path, {0: 4}), ScriptedReader()
    reader.failing = {ExpertKey(0, 2)}
    with open_arena(records, reader=reader) as arena:
        wait_until_read_ahead(arena)
        assert arena.num_resident == 3
        for _ in range(2):
            outcome, errors = arena.require(keys(1, 2))
            assert outcome == Outcome()
            assert list(errors) == keys(2)
            error = errors[ExpertKey(0, 2)]
            assert isinstance(error, ReadError)
            assert (error.file, error.offset) == (tmp_path / "0-2.bin", 0)
            arena.release(keys(1))
            assert not arena._holds
        reader.failing.clear()
        assert arena.require(keys(2))[0].reads == 1
        check_records(arena, records, keys(2))
        assert arena.num_resident == 4


def test_file_that_was_cut_fails_with_what_arrived_and_works_once_it_is_whole(tmp_path: Path) -> None:
    """Contract 2.7: a short read says how much was asked and how much there was."""
    records = write_records(tmp_path, {0: 2})
    file = tmp_path / "0-1.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:200])
    with open_arena(records) as arena:
        wait_until_read_ahead(arena)
        error = arena.require(keys(1))[1][ExpertKey(0, 1)]
        assert isinstance(error, ReadError)
        assert (error.offset, error.asked, error.got) == (192, 96, 8)
        with file.open("r+b") as handle:
            handle.write(whole)
        assert not arena.require(keys(1))[1]
        check_records(arena, records, keys(1))


def test_failed_read_reaches_everybody_who_waits_for_it(tmp_path: Path) -> None:
    """Two that want the same record both learn that it cannot be read."""
    records, reader = write_records(tmp_path, {0: 2}), ScriptedReader()
    reader.failing = {ExpertKey(0, 0)}
    reader.gate.clear()
    with open_arena(records, reader=reader) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with requiring(arena, keys(0)) as first, requiring(arena, keys(0)) as second:
            with arena._changed:
                assert arena._changed.wait_for(lambda: arena._holds.get(ExpertKey(0, 0)) == 2, WAIT_S)
            reader.gate.set()
        assert list(first[0][1]) == list(second[0][1]) == keys(0)
        assert not arena._holds


def test_close_wakes_who_waits(tmp_path: Path) -> None:
    """Closing while somebody waits for a record ends the wait with an error, and no thread is left."""
    records, reader = write_records(tmp_path, {0: 4}), ScriptedReader()
    reader.gate.clear()
    before = threading.active_count()
    with open_arena(records, reader=reader, num_threads=2) as arena:
        assert reader.is_waiting.wait(WAIT_S)
        with requiring(arena, keys(3)) as results:
            with arena._changed:
                assert arena._changed.wait_for(lambda: ExpertKey(0, 3) in arena._holds, WAIT_S)
            closing = threading.Thread(target=arena.close)
            closing.start()
            with arena._changed:
                assert arena._changed.wait_for(lambda: arena._is_closed, WAIT_S)
            reader.gate.set()
        closing.join(WAIT_S)
        assert list(results[0][1]) == keys(3)
        assert "closed" in str(results[0][1][ExpertKey(0, 3)])
        assert not arena._holds
        arena.close()
    assert threading.active_count() == before


def test_close_of_an_arena_that_never_started_returns(tmp_path: Path) -> None:
    """An arena whose opening failed is closed like any other."""
    with open_arena(write_records(tmp_path, {0: 1}), is_started=False) as arena:
        assert arena.num_resident == 0


def test_reader_thread_that_dies_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 2.7: whatever ends a reader thread ends the waits for its records too, with that as the cause."""
    fault = RuntimeError("callback")

    def fail(done: int, total: int) -> None:
        raise fault

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with open_arena(write_records(tmp_path, {0: 3}), is_started=False) as arena:
        arena._progress = (fail, arena._progress[1])
        with requiring(arena, keys(1, 2)) as results:
            arena.start()
        (_, errors), *_ = results
        assert errors
        assert {error.__cause__ for error in errors.values()} == {fault}
        arena.release(key for key in keys(1, 2) if key not in errors)
        assert not arena._holds
