"""The log file: whole lines, rotation, torn tails, and descriptors that are not ours any more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from children import parse_line, run_script

from expertstream.steps.log_file import LogFile
from expertstream.steps.log_stream import LogStream

needs_fifo = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


@pytest.mark.parametrize("keep_open", [True, False])
def test_log_file_that_was_rotated_away_is_opened_anew(tmp_path: Path, keep_open: bool) -> None:
    """Contract 4.2: the file is reopened when it was rotated away."""
    log, old = tmp_path / "log", tmp_path / "log.1"
    file = LogFile(log, keep_open=keep_open)
    file.append(b"1\n")
    if not keep_open or sys.platform != "win32":
        os.replace(log, old)
        file.append(b"2\n")
        assert (old.read_bytes(), log.read_bytes()) == (b"1\n", b"2\n")
        log.unlink()
        file.append(b"3\n")
        assert log.read_bytes() == b"3\n"
    file.close()


def test_log_file_continues_what_is_there(tmp_path: Path) -> None:
    """Contract 4.2: the file is appended to; half a line that a killed process left stays on its own."""
    log = tmp_path / "log"
    log.write_bytes(b"1\n")
    os.utime(log, (0, 0))
    LogFile(log).append(b"2\n")
    log.write_bytes(log.read_bytes() + b'{"cut')
    os.utime(log, (0, 0))
    LogFile(log).append(b"3\n")
    assert log.read_bytes() == b'1\n2\n{"cut\n3\n'


def test_log_file_takes_no_line_under_way_for_a_torn_one(tmp_path: Path) -> None:
    """What another process is writing at this moment looks like half a line, and must not get a newline too many."""
    log = tmp_path / "log"
    log.write_bytes(b"under way")
    LogFile(log).append(b"1\n")
    assert log.read_bytes() == b"under way1\n"


def test_log_file_resolves_a_relative_path_when_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change of the working directory does not move the log."""
    monkeypatch.chdir(tmp_path)
    file = LogFile("log")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    file.append(b"1\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"1\n"
    assert file.key == LogFile(tmp_path / "inner" / ".." / "log").key


def test_log_file_without_its_folder_fails_and_recovers(tmp_path: Path) -> None:
    """The folder is not created; once it is there, lines arrive."""
    file = LogFile(tmp_path / "missing" / "log")
    with pytest.raises(FileNotFoundError):
        file.append(b"1\n")
    (tmp_path / "missing").mkdir()
    file.append(b"2\n")
    assert Path(file.path).read_bytes() == b"2\n"
    assert repr(file) == f"<LogFile {file.path}: {'closed' if sys.platform == 'win32' else 'open'}>"


def test_log_file_leaves_a_descriptor_that_became_another_file_alone(tmp_path: Path) -> None:
    """A daemon may close every descriptor: the number may be another file's, which is neither written nor closed."""
    file = LogFile(tmp_path / "log", keep_open=True)
    file.append(b"1\n")
    fd = file._fd
    assert fd is not None
    other = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)
    os.dup2(other, fd)
    file.append(b"2\n")
    file.close()
    os.fstat(fd)
    os.close(fd)
    os.close(other)
    assert ((tmp_path / "log").read_bytes(), (tmp_path / "other").read_bytes()) == (b"1\n2\n", b"")


FULL = """
import resource, sys
from expertstream.steps.log_file import LogFile
file = LogFile(sys.argv[1])
file.append(b'{"event": 1}\\n')
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
try:
    file.append(b'{"event": "cut"}\\n')
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
file.append(b'{"event": 2}\\n')
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_log_file_takes_half_a_line_back(tmp_path: Path) -> None:
    """Contract 4.2: whole lines only: the part that a full disk took is taken back, and the next line is whole."""
    child = run_script(tmp_path, FULL)
    assert "Wrote 7 of 17 bytes" in child.stdout
    assert [entry["event"] for entry in child.entries] == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_log_file_that_cannot_take_back_separates_the_next_line(tmp_path: Path) -> None:
    """Where half a line cannot be taken back, the next entry starts on a line of its own."""
    source = FULL.replace("soft,", "import os\ndef refuse(*_): raise OSError\nos.ftruncate = refuse\nsoft,", 1)
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        run_script(tmp_path, source)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert lines[1] == '{"event'
    assert [parse_line(line)["event"] for line in (lines[0], lines[2])] == [1, 2]


@needs_fifo
def test_log_file_that_is_a_pipe_without_a_reader_fails_at_once(tmp_path: Path) -> None:
    """A sink never holds up a step: a pipe that nobody reads fails instead of waiting."""
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        LogFile(tmp_path / "pipe").append(b"1\n")


WRITER = """
import multiprocessing, sys
from expertstream.steps.sink import LogSink
def write(number):
    sink = LogSink(log_file=sys.argv[1], host=False)
    for index in range(100):
        sink.entry("line", writer=number, index=index, filler="x" * 10_000)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=write, args=(number,)) for number in range(4)]
    [child.start() for child in children]
    [child.join() for child in children]
"""


def test_log_file_of_four_processes_holds_whole_lines(tmp_path: Path) -> None:
    """Contract 4.2: whole lines, also when several processes append long ones to the same file."""
    child = run_script(tmp_path, WRITER)
    written = {(entry["writer"], entry["index"]) for entry in child.entries}
    assert len(child.entries) == 400
    assert written == {(writer, index) for writer in range(4) for index in range(100)}
    for writer in range(4):
        numbers = [entry["seq"] for entry in child.entries if entry["writer"] == writer]
        assert numbers == list(range(1, 101))


@pytest.mark.skipif(not hasattr(os, "set_blocking"), reason="needs pipes that do not block")
def test_log_stream_that_took_half_a_line_separates_the_next() -> None:
    """A pipe that does not block and is full takes part of a line; the next line is whole."""
    end, begin = os.pipe()
    os.set_blocking(begin, False)
    with os.fdopen(begin, "w") as text, os.fdopen(end, "rb", buffering=0) as reader:
        stream = LogStream(text)
        with pytest.raises(BlockingIOError):
            stream.write("x" * 10_000_000 + "\n")
        got = reader.read(10_000_000)
        stream.write("whole\n")
        got += reader.read(100)
    assert got.endswith(b"x\nwhole\n")
    assert repr(stream) == f"<LogStream {begin}>"
