"""The header of one safetensors file: what is accepted, and what each wrong file is told."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import pytest
from checkpoints import raw_shard, shard_bytes, tensor

from expertstream.memory.errors import HeaderError, TruncatedShardError
from expertstream.memory.header import DTYPE_BITS, read_header

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


def test_read_header_good_file_places_every_tensor(tmp_path: Path) -> None:
    """An entry's bytes are the file's bytes from its absolute offset on."""
    content = shard_bytes(TWO, {"format": "pt"})
    header = read_header(write(tmp_path, content))
    assert dict(header.metadata) == {"format": "pt"}
    assert header.file_bytes == len(content)
    assert header.data_offset == len(content) - 32
    for name, one in TWO.items():
        found = header.entries[name]
        assert (found.name, found.dtype, found.shape) == (name, one.dtype, one.shape)
        assert content[found.offset : found.offset + found.nbytes] == one.payload


def test_read_header_entries_in_any_order_come_in_file_order(tmp_path: Path) -> None:
    """The order of the header's keys is free; entries come in the order of their bytes."""
    header = {"late": entry(offsets=(4, 8)), "early": entry()}
    assert list(read_header(write(tmp_path, raw_shard(header, bytes(8)))).entries) == ["early", "late"]


def test_read_header_padded_header_is_accepted(tmp_path: Path) -> None:
    """Writers pad the header with blanks to align the data."""
    padded = raw_shard(json.dumps({"x": entry()}) + "   ", bytes(4))
    assert read_header(write(tmp_path, padded)).entries["x"].nbytes == 4


def test_read_header_file_without_tensors_is_empty(tmp_path: Path) -> None:
    """A header without tensors is valid and has none."""
    assert not read_header(write(tmp_path, raw_shard("{}"))).entries


def test_dtype_table_agrees_with_the_table_of_the_tests() -> None:
    """Every safetensors dtype is known, with its bits."""
    assert dict(DTYPE_BITS) == checkpoints.BITS


@pytest.mark.parametrize("dtype", sorted(checkpoints.BITS))
def test_read_header_every_dtype_keeps_name_and_logical_shape(tmp_path: Path, dtype: str) -> None:
    """Raw bytes of any listed dtype are placed, packed ones included, and the shape stays the logical one."""
    one = tensor(dtype, 3, 8)
    found = read_header(write(tmp_path, shard_bytes({"x": one}))).entries["x"]
    assert (found.dtype, found.shape, found.nbytes) == (dtype, (3, 8), len(one.payload))


def test_read_header_unknown_dtype_is_named(tmp_path: Path) -> None:
    """An invented dtype is refused by name, with the known ones."""
    message = refusal(tmp_path, raw_shard({"x": entry(dtype="F6_X")}, bytes(4)))
    assert "'x'" in message
    assert "'F6_X'" in message
    assert "F6_E2M3" in message


def test_read_header_odd_number_of_half_bytes_is_refused(tmp_path: Path) -> None:
    """Three 4-bit elements fill no whole number of bytes."""
    assert "[3] of F4" in refusal(tmp_path, raw_shard({"x": entry("F4", (3,), (0, 2))}, bytes(2)))


def test_read_header_zero_size_and_scalar_are_accepted(tmp_path: Path) -> None:
    """Zero-size tensors have zero bytes wherever they lie, and a scalar has one element."""
    tensors = {"none": tensor("F32", 0, 8), "x": tensor("U8", 4), "dummy": tensor("BF16", 8, 0), "one": tensor("F64")}
    entries = read_header(write(tmp_path, shard_bytes(tensors))).entries
    assert {name: found.nbytes for name, found in entries.items()} == {"none": 0, "x": 4, "dummy": 0, "one": 8}
    assert entries["one"].shape == ()
    late = raw_shard({"x": entry(), "none": entry(shape=(0,), offsets=(0, 0))}, bytes(4))
    assert list(read_header(write(tmp_path, late)).entries) == ["none", "x"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (entry(shape=(5,)), "does not fill its 4 bytes"),
        (entry(shape=(0, 5)), "does not fill its 4 bytes"),
        (entry(shape=(2**62, 2**62)), "does not fill"),
        (entry(shape=(), offsets=(0, 0)), "does not fill its 0 bytes"),
        (entry(shape=(-4,)), "shape has -4"),
        (entry(shape=(True, 4)), "shape has True"),
        (entry(shape=(4.0,)), "shape has 4.0"),
        (entry(shape=(2**63,)), "2**63 - 1"),
        (entry(shape="4"), "shape is '4' and not a list"),
        (entry(offsets=(4, 0)), "end at 0, before they begin at 4"),
        (entry(offsets=(0,)), "are 1 numbers and not 2"),
        (entry(offsets=(-1, 3)), "data_offsets has -1"),
        (entry(offsets=None), "data_offsets is None"),
        (entry(dtype=None), "dtype None"),
        (entry(dtype=["U8"]), "dtype ['U8']"),
        ({"shape": [4], "data_offsets": [0, 4]}, "dtype None"),
        ([1], "entry is [1]"),
    ],
)
def test_read_header_entry_that_contradicts_itself_is_refused(tmp_path: Path, fields: object, told: str) -> None:
    """Shape times dtype equals the length, and every number is a count; the tensor is named."""
    with pytest.raises(HeaderError) as caught:
        read_header(write(tmp_path, raw_shard({"the.tensor": fields}, bytes(4))))
    assert caught.value.tensor == "the.tensor"
    assert told in str(caught.value)


def test_read_header_overlap_names_both(tmp_path: Path) -> None:
    """Two tensors that share bytes are refused, and both are named."""
    message = refusal(tmp_path, raw_shard({"first": entry(), "second": entry(offsets=(2, 6))}, bytes(6)))
    assert "overlaps" in message
    assert "'first'" in message
    assert "'second'" in message
    assert "2 bytes before" in message


def test_read_header_holes_are_counted(tmp_path: Path) -> None:
    """Bytes between tensors that belong to none are refused with their number."""
    holed = {"a": entry(offsets=(1, 5)), "b": entry(offsets=(5, 9)), "c": entry(offsets=(12, 16))}
    message = refusal(tmp_path, raw_shard(holed, bytes(16)))
    assert "2 holes (4 bytes)" in message
    assert "before 'a'" in message


@pytest.mark.parametrize(
    "header",
    [
        '{"x": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}, "x": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        '{"y": {"dtype":"U8","shape":[4],"x":1,"x":2,"data_offsets":[0,4]}}',
    ],
)
def test_read_header_duplicate_key_is_refused(tmp_path: Path, header: str) -> None:
    """A key given twice has no meaning, at any depth."""
    assert "'x' is given twice" in refusal(tmp_path, raw_shard(header, bytes(4)))


@pytest.mark.parametrize("metadata", [[], None, {"format": 1}])
def test_read_header_metadata_that_is_no_text_is_refused(tmp_path: Path, metadata: object) -> None:
    """Metadata is text by key."""
    assert "__metadata__" in refusal(tmp_path, raw_shard({"__metadata__": metadata}))


def test_read_header_short_file_names_sizes_and_first_tensor_cut(tmp_path: Path) -> None:
    """A short file is told expected and actual size and the first tensor, in file order, that is not whole."""
    tensors = {"z": tensor("U8", 10), "m": tensor("U8", 5), "a": tensor("U8", 5)}
    content = shard_bytes(tensors)
    with pytest.raises(TruncatedShardError) as caught:
        read_header(write(tmp_path, content[:-7]))
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (len(content), len(content) - 7)
    assert caught.value.tensor == "m"
    assert str(len(content)) in str(caught.value)
    assert "7 missing" in str(caught.value)


def test_read_header_long_file_counts_the_extra_bytes(tmp_path: Path) -> None:
    """A long file is refused with the number of extra bytes, and is not called short."""
    with pytest.raises(HeaderError) as caught:
        read_header(write(tmp_path, shard_bytes(TWO) + b"\0\0\0"))
    assert "3 extra bytes" in str(caught.value)
    assert not isinstance(caught.value, TruncatedShardError)


def test_read_header_length_past_the_end_is_a_short_file(tmp_path: Path) -> None:
    """A header that the file cuts is a short file in which no tensor can be named."""
    with pytest.raises(TruncatedShardError) as caught:
        read_header(write(tmp_path, raw_shard('{"x"', length=500)))
    assert (caught.value.expected_bytes, caught.value.actual_bytes, caught.value.tensor) == (508, 12, None)


@pytest.mark.parametrize("file", sorted(MODEL.glob("*.safetensors")), ids=lambda file: file.name)
def test_read_header_agrees_with_the_safetensors_library(file: Path) -> None:
    """On a file of a real model: the same names, dtypes, shapes and bytes as the reference reader."""
    safetensors = pytest.importorskip("safetensors")
    content = file.read_bytes()
    entries = read_header(file).entries
    reference = dict(safetensors.deserialize(content))
    assert entries.keys() == reference.keys()
    for name, want in reference.items():
        found = entries[name]
        assert (found.dtype, list(found.shape)) == (want["dtype"], want["shape"])
        assert content[found.offset : found.offset + found.nbytes] == bytes(want["data"])
