"""Reads the header of one safetensors file and refuses every header that does not describe its file exactly."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from .errors import CheckpointError, HeaderError, ReadError, TruncatedShardError, shown
from .regular_file import regular_bytes

__all__ = ["DTYPE_BITS", "MAX_HEADER_BYTES", "Header", "TensorEntry", "describe_text", "parse_object", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""The longest header that is read, in bytes: the same limit that the safetensors library has."""

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "F8_E4M3": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2": 8,
        "F8_E5M2FNUZ": 8,
        "F8_E8M0": 8,
        "I8": 8,
        "U8": 8,
        "BF16": 16,
        "F16": 16,
        "I16": 16,
        "U16": 16,
        "F32": 32,
        "I32": 32,
        "U32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
"""Bits of one element of each safetensors dtype."""

_LENGTH_BYTES = 8
_SNIFF_BYTES = 512
_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: its bytes are `file[offset : offset + nbytes]`, whatever its dtype.

    Args:
        name: its name in the checkpoint.
        file: the file that holds it.
        dtype: its safetensors name, such as "BF16"; a key of `DTYPE_BITS`.
        shape: the logical shape, in elements, also where several elements share a byte; () is a scalar.
        offset: bytes from the start of the file to its first byte.
        nbytes: its bytes; 0 where a dimension is 0.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file holds.

    Args:
        entries: its tensors by name, in the order of their bytes in the file.
        metadata: the free text that the writer left, by key.
        file_bytes: size of the file.
        data_offset: bytes from the start of the file to the first tensor.
    """

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    file_bytes: int
    data_offset: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Reads and checks the header of a safetensors file; of the tensors themselves nothing is read.

    Args:
        path: the file.

    Returns:
        A header in which every entry fits its dtype, its shape, its neighbours and the size of the file.

    Raises:
        HeaderError: if the file is something else, or its header contradicts itself or the file.
        TruncatedShardError: if the file is shorter than its header promises.
        ReadError: if the system cannot open or read it.
    """
    file = Path(path)
    try:
        file_bytes = regular_bytes(file, HeaderError, "a safetensors file")
        with open(file, "rb") as stream:
            length = _checked_length(file, file_bytes, stream.read(_SNIFF_BYTES))
            stream.seek(_LENGTH_BYTES)
            raw = stream.read(length)
    except OSError as exc:
        raise ReadError(file, 0, _LENGTH_BYTES, 0, exc.strerror or str(exc)) from exc
    except ValueError as exc:  # A NUL, or text that the file system cannot encode.
        raise HeaderError(file, f"its path cannot be used: {exc}") from exc
    if len(raw) < length:
        raise ReadError(file, _LENGTH_BYTES, length, len(raw), "the file ended: it became shorter meanwhile")
    return _checked_header(file, file_bytes, _LENGTH_BYTES + length, parse_object(raw, file, HeaderError))


def describe_text(head: bytes) -> str | None:
    """Recognises text that downloads leave in place of a file.

    Args:
        head: the first bytes of the file.

    Returns:
        What it is, as the end of a sentence that begins with "it is"; None where it is none of these.
    """
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"\nsize (\d{1,18})\s", start)
        stands_for = f"the {int(size[1])} bytes" if size else "the file"
        return f"a Git LFS pointer and not {stands_for} that it stands for (`git lfs pull` fetches them)"
    if re.match(rb"<(!doctype html|html|head|body|!--)", start):
        return "an HTML page: most likely an error or a login page that was saved in place of the file"
    if start.startswith(b"<?xml"):
        return "an XML document: most likely an error report that was saved in place of the file"
    return None


def parse_object(raw: bytes, file: Path, error: type[CheckpointError] = CheckpointError) -> dict[str, object]:
    """Parses a JSON object in which no key may appear twice.

    Args:
        raw: UTF-8 text, with or without a byte order mark.
        file: where it came from, for the message.
        error: the class to raise.

    Returns:
        The object.

    Raises:
        CheckpointError: or the class asked for, if the text is no such object; it names line and column.
    """
    try:
        parsed: object = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError as exc:
        raise error(file, f"its JSON is not UTF-8 at byte {exc.start}") from exc
    except json.JSONDecodeError as exc:
        raise error(file, f"its JSON is broken at line {exc.lineno}, column {exc.colno}: {exc.msg}") from exc
    except RecursionError as exc:
        raise error(file, "its JSON is nested too deeply") from exc
    except ValueError as exc:  # A key given twice, or a number with more digits than Python converts.
        raise error(file, f"its JSON cannot be used: {exc}") from exc
    if not isinstance(parsed, dict):
        raise error(file, f"its JSON is a {type(parsed).__name__} where an object is expected")
    return parsed


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(twice)} is given twice")
    return unique


def _checked_length(file: Path, file_bytes: int, head: bytes) -> int:
    if file_bytes == 0:
        raise HeaderError(file, "it is empty (0 bytes)")
    if text := describe_text(head):
        raise HeaderError(file, f"it is {text}")
    if min(file_bytes, len(head)) < _LENGTH_BYTES:
        raise HeaderError(file, f"it has {file_bytes} bytes, fewer than the {_LENGTH_BYTES} of a header length")
    first = head[:_LENGTH_BYTES]
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        if first.isascii() and first.decode("ascii").isprintable():
            raise HeaderError(file, f"it begins with the text {first.decode('ascii')!r}, not with a header length")
        beyond = f", and past the end of the file ({file_bytes} bytes)" if length > file_bytes else ""
        limit = f"{MAX_HEADER_BYTES} bytes ({MAX_HEADER_BYTES // 10**6} MB)"
        raise HeaderError(file, f"its header length of {length} bytes is over the limit of {limit}{beyond}")
    if _LENGTH_BYTES + length > file_bytes:
        raise TruncatedShardError(file, _LENGTH_BYTES + length, file_bytes)
    if length < 2 or head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        raise HeaderError(file, f"its header of {length} bytes does not begin with {{")
    return length


def _checked_header(file: Path, file_bytes: int, data_offset: int, parsed: dict[str, object]) -> Header:
    metadata = _metadata(file, parsed.pop("__metadata__", {}))
    entries = [_entry(file, name, fields, data_offset) for name, fields in parsed.items()]
    # An empty tensor sits where the next one begins, hence before it.
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_layout(file, file_bytes, data_offset, entries)
    return Header({entry.name: entry for entry in entries}, metadata, file_bytes, data_offset)


def _metadata(file: Path, parsed: object) -> dict[str, str]:
    if not isinstance(parsed, dict):
        raise HeaderError(file, f"its __metadata__ is {shown(parsed)} and not an object")
    for key, value in parsed.items():
        if not isinstance(value, str):
            raise HeaderError(file, f"its __metadata__ has {shown(value)} under {shown(key)} and not a string")
    return parsed


def _entry(file: Path, name: str, fields: object, data_offset: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise HeaderError(file, f"its entry is {shown(fields)} and not an object", name)
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise HeaderError(file, f"its dtype {shown(dtype)} is none of {', '.join(DTYPE_BITS)}", name)
    shape = _counts(file, name, "shape", fields.get("shape"))
    offsets = _counts(file, name, "data_offsets", fields.get("data_offsets"))
    if len(offsets) != 2:
        raise HeaderError(file, f"its data_offsets are {len(offsets)} numbers and not 2", name)
    begin, end = offsets
    if end < begin:
        raise HeaderError(file, f"its data_offsets end at {end}, before they begin at {begin}", name)
    if _num_bits(shape, DTYPE_BITS[dtype], limit=8 * (end - begin)) != 8 * (end - begin):
        problem = f"its shape {shown(list(shape))} of {dtype} does not fill its {end - begin} bytes exactly"
        raise HeaderError(file, problem, name)
    return TensorEntry(name, file, dtype, shape, data_offset + begin, end - begin)


def _counts(file: Path, name: str, key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise HeaderError(file, f"its {key} is {shown(value)} and not a list", name)
    for count in value:
        # JSON's true is an int to Python; a size it is not.
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            raise HeaderError(file, f"its {key} has {shown(count)}, which is no count from 0 to 2**63 - 1", name)
    return tuple(value)


def _num_bits(shape: tuple[int, ...], bits: int, *, limit: int) -> int:
    """Bits of a tensor, or some number over the limit: a hostile shape must not cost a product of a million factors."""
    if 0 in shape:
        return 0
    for count in shape:
        bits *= count
        if bits > limit:
            break
    return bits


def _check_layout(file: Path, file_bytes: int, data_offset: int, entries: Iterable[TensorEntry]) -> None:
    end, previous, cut = data_offset, None, None
    num_holes, hole_bytes, after_hole = 0, 0, None
    for entry in entries:
        if entry.offset < end:
            problem = f"it overlaps another: it begins {end - entry.offset} bytes before the end of {shown(previous)}"
            raise HeaderError(file, problem, entry.name)
        if entry.offset > end:
            num_holes, hole_bytes = num_holes + 1, hole_bytes + entry.offset - end
            after_hole = after_hole or entry.name
        end, previous = entry.offset + entry.nbytes, entry.name
        if cut is None and entry.nbytes and end > file_bytes:
            cut = entry.name
    if num_holes:
        holes = f"{num_holes} hole{'' if num_holes == 1 else 's'} ({hole_bytes} bytes) that no tensor covers"
        raise HeaderError(file, f"it has {holes}, the first before {shown(after_hole)}")
    if end > file_bytes:
        raise TruncatedShardError(file, end, file_bytes, cut)
    if end < file_bytes:
        raise HeaderError(file, f"it has {file_bytes - end} extra bytes after its last tensor")
