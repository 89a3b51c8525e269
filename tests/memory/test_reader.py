"""Positioned reads: whole or an error, on every strategy; descriptors closed exactly once."""

from __future__ import annotations

import errno
import io
import os
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from expertstream.memory import reader as reader_module
from expertstream.memory.errors import CheckpointError, ReadError
from expertstream.memory.reader import FileReader, SeekAndRead

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CONTENT = Random(0).randbytes(100_000)
LACKING = {"preadv": (), "pread": ("preadv",), "seek": ("preadv", "pread")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shard.safetensors"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=LACKING)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileReader]:
    """A reader as it is on a platform that lacks the better calls."""
    for name in LACKING[request.param]:
        monkeypatch.delattr(os, name, raising=False)
    with FileReader() as made:
        yield made


def open_descriptors(file: Path) -> int:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("this system does not list a process's descriptors")
    return sum(os.path.realpath(fd) == str(file) for fd in descriptors.iterdir())


def test_read_into_any_strategy_fills_the_buffer(reader: FileReader, file: Path) -> None:
    """The buffer holds the file's bytes from the offset on, and the count is its size."""
    for offset, size in ((0, 1), (17, 5000), (99_999, 1), (0, 100_000)):
        buffer = bytearray(size)
        assert reader.read_into(file, offset, buffer) == size
        assert buffer == CONTENT[offset : offset + size]


def test_read_into_buffer_of_wider_items_counts_bytes(reader: FileReader, file: Path) -> None:
    """A buffer is its bytes, whatever its items are; a part of one is filled in place."""
    wide = array("I", bytes(32))
    assert reader.read_into(file, 3, wide) == 32
    assert wide.tobytes() == CONTENT[3:35]
    arena = bytearray(10)
    assert reader.read_into(file, 50, memoryview(arena)[4:7]) == 3
    assert arena == bytes(4) + CONTENT[50:53] + bytes(3)


def test_read_into_past_the_end_raises_with_the_counts(reader: FileReader, file: Path) -> None:
    """Contract 2.7: a short read raises with the file, the offset and the counts, and a retry works."""
    with pytest.raises(ReadError) as caught:
        reader.read_into(file, 99_990, bytearray(50))
    error = caught.value
    assert (error.file, error.offset, error.asked, error.got) == (file, 99_990, 50, 10)
    assert str(error) == f"Cannot read {file}: 50 bytes asked at offset 99990, 10 read: the file ended."
    assert isinstance(error, CheckpointError)
    assert reader.read_into(file, 99_990, bytearray(10)) == 10


def test_read_into_many_threads_do_not_disturb_each_other(reader: FileReader, file: Path) -> None:
    """Threads may read one file at once, and it is opened once."""

    def read(offset: int) -> bool:
        buffer = bytearray(977)
        reader.read_into(file, offset, buffer)
        return buffer == CONTENT[offset : offset + 977]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, [(index * 7919) % 99_000 for index in range(400)]))
    assert reader.num_open_files == 1


def test_seek_and_read_holds_its_lock_from_seek_to_read(file: Path) -> None:
    """No other thread can move the position of a file between a seek and the read that belongs to it."""
    lock = threading.Lock()
    held: list[bool] = []

    class Watched(io.FileIO):
        def seek(self, offset: int, whence: int = 0) -> int:
            held.append(lock.locked())
            return super().seek(offset, whence)

        def readinto(self, buffer: WriteableBuffer, /) -> int | None:
            held.append(lock.locked())
            return super().readinto(buffer)

    buffer = bytearray(4)
    with Watched(file, "rb") as raw:
        assert SeekAndRead(lock)(raw, memoryview(buffer), 9) == 4
    assert buffer == CONTENT[9:13]
    assert held == [True, True]
    assert not lock.locked()


def test_default_strategy_without_positioned_reads_is_seek_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the platform has no positioned read, the portable one is chosen."""
    for name in LACKING["seek"]:
        monkeypatch.delattr(os, name, raising=False)
    assert isinstance(reader_module.default_strategy(), SeekAndRead)


def test_read_into_cap_is_kept_in_every_call(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No single system call asks for more than the cap, and the parts join without a seam."""
    sizes: list[int] = []
    whole = reader_module.default_strategy()

    def counting(raw: io.FileIO, view: memoryview, offset: int) -> int:
        sizes.append(len(view))
        return whole(raw, view, offset)

    monkeypatch.setattr(reader_module, "MAX_CALL_BYTES", 30_000)
    buffer = bytearray(100_000)
    with FileReader(counting) as reader:
        reader.read_into(file, 0, buffer)
    assert buffer == CONTENT
    assert sizes == [30_000, 30_000, 30_000, 10_000]


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="replaces os.preadv")
def test_read_into_short_and_interrupted_calls_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may return less than was asked, or be interrupted: the read goes on where it was."""
    real, calls = os.preadv, 0

    def stuttering(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise InterruptedError(errno.EINTR, "interrupted")
        return real(fd, [buffers[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", stuttering)
    buffer = bytearray(9_500)
    with FileReader() as reader:
        assert reader.read_into(file, 123, buffer) == 9_500
    assert buffer == CONTENT[123:9_623]
    assert calls == 15


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="replaces os.preadv")
@pytest.mark.parametrize("failure", [0, OSError(errno.EIO, "Input/output error")])
def test_read_into_failure_in_the_middle_raises_with_what_arrived(
    file: Path, monkeypatch: pytest.MonkeyPatch, failure: int | OSError
) -> None:
    """Contract 2.7: a file that ends or fails half-way raises with the bytes that had arrived, and a retry works."""
    real = os.preadv

    def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset < 1000:
            return real(fd, [buffers[0][: 1000 - offset]], offset)
        if isinstance(failure, OSError):
            raise failure
        return failure

    monkeypatch.setattr(os, "preadv", failing)
    with FileReader() as broken, pytest.raises(ReadError) as caught:
        broken.read_into(file, 400, bytearray(5000))
    assert (caught.value.offset, caught.value.asked, caught.value.got) == (400, 5000, 600)
    assert caught.value.__cause__ is (failure if failure else None)
    monkeypatch.undo()
    with FileReader() as reader:
        assert reader.read_into(file, 400, bytearray(5000)) == 5000


def test_read_into_absent_file_raises_with_its_cause(reader: FileReader, tmp_path: Path) -> None:
    """A file that cannot be opened is a read of 0 bytes, with the system's error chained, and leaves nothing open."""
    with pytest.raises(ReadError, match="No such file") as caught:
        reader.read_into(tmp_path / "absent", 0, bytearray(4))
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert reader.num_open_files == 0


def test_read_into_empty_buffer_opens_nothing(reader: FileReader, tmp_path: Path) -> None:
    """A zero-size tensor costs no read and no descriptor."""
    assert reader.read_into(tmp_path / "absent", 0, bytearray()) == 0
    assert reader.num_open_files == 0


def test_read_into_wrong_argument_is_refused_by_name(reader: FileReader, file: Path) -> None:
    """A caller's mistake is named, before a file is opened."""
    with pytest.raises(ValueError, match="offset must be 0 or more, and is -1"):
        reader.read_into(file, -1, bytearray(4))
    with pytest.raises(ValueError, match="buffer must be writable"):
        reader.read_into(file, 0, memoryview(b"1234"))
    with pytest.raises(TypeError, match="contiguous"):
        reader.read_into(file, 0, memoryview(bytearray(8))[::2])
    assert reader.num_open_files == 0


def test_close_releases_every_descriptor_and_reads_then_fail(reader: FileReader, file: Path) -> None:
    """Closing releases every file, any number of times, and nothing is opened again."""
    reader.read_into(file, 0, bytearray(4))
    reader.read_into(file, 8, bytearray(4))
    assert (reader.num_open_files, open_descriptors(file)) == (1, 1)
    assert repr(reader) == "<FileReader open: 1 files, 0 reads now>"
    for _ in range(3):
        reader.close()
    assert (reader.num_open_files, open_descriptors(file)) == (0, 0)
    assert repr(reader) == "<FileReader closed: 0 files, 0 reads now>"
    with pytest.raises(ReadError, match="the reader is closed") as caught:
        reader.read_into(file, 5, bytearray(4))
    assert (caught.value.offset, caught.value.asked, caught.value.got) == (5, 4, 0)
    assert not reader.advise(file, 0, 4)
    assert open_descriptors(file) == 0


def test_close_during_a_read_leaves_its_descriptor_until_it_ends(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor in use is never closed under a read, whose number another file could get; the read then stops."""
    entered, closed = threading.Event(), threading.Event()
    seen: list[int] = []

    def waiting(raw: io.FileIO, view: memoryview, offset: int) -> int:
        entered.set()
        assert closed.wait(10)
        seen.append(os.fstat(raw.fileno()).st_size)
        return len(view)

    monkeypatch.setattr(reader_module, "MAX_CALL_BYTES", 10)
    reader = FileReader(waiting)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(reader.read_into, file, 0, bytearray(20))
        assert entered.wait(10)
        reader.close()
        assert (reader.num_open_files, open_descriptors(file)) == (1, 1)
        closed.set()
        with pytest.raises(ReadError, match="20 bytes asked at offset 0, 10 read: the reader is closed"):
            running.result(10)
    assert seen == [len(CONTENT)]
    assert (reader.num_open_files, open_descriptors(file)) == (0, 0)


def test_descriptor_is_not_inherited(file: Path) -> None:
    """A child process gets none of the files."""
    inherited: list[bool] = []

    def looking(raw: io.FileIO, view: memoryview, offset: int) -> int:
        inherited.append(os.get_inheritable(raw.fileno()))
        return len(view)

    with FileReader(looking) as reader:
        reader.read_into(file, 0, bytearray(4))
    assert inherited == [False]


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="replaces os.posix_fadvise")
def test_advise_asks_the_kernel_for_the_range(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint is passed on with its range, and its answer is whether the kernel took it."""
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: asked.append(rest))
    with FileReader() as reader:
        assert reader.advise(file, 10, 20)
        assert asked == [(10, 20, getattr(os, "POSIX_FADV_WILLNEED", None))]
        assert not reader.advise(file, 10, 0)
        assert len(asked) == 1
        with pytest.raises(ValueError, match="must be 0 or more, and are -1 and 4"):
            reader.advise(file, -1, 4)


def test_advise_where_it_fails_or_does_not_exist_is_false(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint never fails its caller: a refusal, a file that is not there and a platform without it are all False."""

    def refusing(*_: int) -> None:
        raise OSError(errno.ESPIPE, "Illegal seek")

    with FileReader() as reader:
        assert not reader.advise(file.with_name("absent"), 0, 4)
        monkeypatch.setattr(os, "posix_fadvise", refusing, raising=False)
        assert not reader.advise(file, 0, 4)
        monkeypatch.delattr(os, "posix_fadvise")
        assert not reader.advise(file, 0, 4)
        assert reader.read_into(file, 0, bytearray(4)) == 4


def test_advise_on_a_real_file_is_accepted_where_the_call_exists(file: Path) -> None:
    """On an ordinary file the kernel takes the hint."""
    with FileReader() as reader:
        assert reader.advise(file, 0, 4096) is hasattr(os, "posix_fadvise")
