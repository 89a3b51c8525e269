"""Files that are no safetensors file, or a hostile one: refused with a true message, and cheaply."""

from __future__ import annotations

import math
import os
import tracemalloc
from pathlib import Path

import pytest
from checkpoints import raw_shard, shard_bytes, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertstream.memory.errors import HeaderError, ReadError
from expertstream.memory.header import DTYPE_BITS, MAX_HEADER_BYTES, read_header

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3_5-moe"
TWO = {"a": tensor("F32", 2, 3, seed=1), "b": tensor("BF16", 4, seed=2)}


def write(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    return file


def refusal(tmp_path: Path, content: bytes) -> str:
    with pytest.raises(HeaderError) as caught:
        read_header(write(tmp_path, content))
    assert caught.value.path == tmp_path / "model.safetensors"
    assert str(caught.value.path) in str(caught.value)
    return str(caught.value)


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_read_header_length_over_the_limit_names_the_limit(tmp_path: Path) -> None:
    """A length over the limit is refused with the limit, also where the file is long enough for it."""
    file = write(tmp_path, raw_shard("{}", length=200_000_000))
    with pytest.raises(HeaderError, match=r"100000000 bytes \(100 MB\), and past the end of the file \(10 bytes\)"):
        read_header(file)
    os.truncate(file, 300_000_000)
    with pytest.raises(HeaderError, match=r"100 MB\)\.$"):
        read_header(file)


@pytest.mark.parametrize("length", [200_000_000, MAX_HEADER_BYTES, 2**64 - 1])
def test_read_header_hostile_length_allocates_nothing(tmp_path: Path, length: int) -> None:
    """A header is read only after its length and its first byte are plausible."""
    file = write(tmp_path, raw_shard(b"\0\0", length=length))
    os.truncate(file, 150_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(HeaderError):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


LOOKALIKES = {
    b"": "empty (0 bytes)",
    b"{}": "2 bytes, fewer than the 8",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4932\n": "Git LFS pointer and not the 4932 bytes",
    b"\n <!DOCTYPE html><title>502</title>": "HTML page",
    b"<HTML><body>login</body>": "HTML page",
    b"<?xml version='1.0'?><Error>AccessDenied</Error>": "XML document",
    b"Entry not found": "begins with the text 'Entry no'",
    (0).to_bytes(8, "little"): "header of 0 bytes does not begin with {",
    raw_shard("[1]"): "does not begin with {",
    raw_shard("\ufeff{}"): "does not begin with {",
    raw_shard('{"x"'): "broken at line 1, column 5",
    raw_shard(b'{"\xff": 1}'): "not UTF-8 at byte 2",
    raw_shard('{"a":' * 5000): "nested too deeply",
    raw_shard('{"a":' + "9" * 5000 + "}"): "cannot be used",
}


@pytest.mark.parametrize(("content", "told"), LOOKALIKES.items(), ids=range(len(LOOKALIKES)))
def test_read_header_other_content_is_named_for_what_it_is(tmp_path: Path, content: bytes, told: str) -> None:
    """Text, pages, pointers and stubs in place of a file each get a message of their own that is true."""
    assert told in refusal(tmp_path, content)


def test_read_header_directory_and_pipe_are_named(tmp_path: Path) -> None:
    """A directory is called a directory, and a named pipe is refused without waiting for a writer."""
    with pytest.raises(HeaderError, match="it is a directory"):
        read_header(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(HeaderError, match="a pipe"):
            read_header(tmp_path / "pipe")


def test_read_header_absent_or_unnameable_file_is_an_error_of_ours(tmp_path: Path) -> None:
    """What the system reports becomes a checkpoint error with the cause chained."""
    with pytest.raises(ReadError, match="No such file") as caught:
        read_header(tmp_path / "absent")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(HeaderError, match="path cannot be used"):
        read_header("a\0b")


def test_read_header_hostile_shape_is_refused_without_multiplying_it_out(tmp_path: Path) -> None:
    """A shape of very many large dimensions is refused as soon as it is too large, and shown shortened."""
    message = refusal(tmp_path, raw_shard({"x": entry(shape=[2**62] * 200_000)}, bytes(4)))
    assert len(message) < 1000


def test_read_header_name_of_a_megabyte_is_shown_shortened(tmp_path: Path) -> None:
    """What comes out of a file is quoted on one line of bounded length, also where it is no valid text."""
    message = refusal(tmp_path, raw_shard({"\ud800\n" + "n" * 10**6: entry(dtype="F6_X")}, bytes(4)))
    assert "\n" not in message
    assert len(message.encode()) < 1000


GOOD = shard_bytes({"a": tensor("F32", 2, 3), "dummy": tensor("I64", 0, 8), "p": tensor("F4", 4, 4)}, {"format": "pt"})
HEADER_END = len(GOOD) - 32


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_read_header_mutated_bytes_raise_only_header_errors(tmp_path: Path, edits: list[tuple[int, int]]) -> None:
    """Whatever bytes the header has, it is accepted with entries inside the file or refused as a header."""
    content = bytearray(GOOD)
    for position, value in edits:
        content[position] = value
    try:
        header = read_header(write(tmp_path, bytes(content)))
    except HeaderError:
        return
    for found in header.entries.values():
        assert header.data_offset <= found.offset <= found.offset + found.nbytes <= len(GOOD)
        assert math.prod(found.shape) * DTYPE_BITS[found.dtype] == 8 * found.nbytes
