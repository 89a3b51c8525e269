"""Expert records: every byte of one expert of one layer, contiguous, and where those bytes come from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.runtime import ALIGNMENT

__all__ = ["ExpertKey", "Part", "Piece", "RecordLayout", "RecordSource", "pack", "torch_dtype"]


class ExpertKey(NamedTuple):
    """One expert within a store: the MoE layer's number (0-based, MTP layers last) and the expert's."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an expert, as the experts module names it.

    Attributes:
        name: The parameter of the experts module, without the leading expert dimension (`gate_up_proj`, …).
        shape: Elements per dimension, the expert dimension removed.
        offset: Bytes from the start of the record; a multiple of `ALIGNMENT`.
        num_bytes: Bytes of the part.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """How one layer's records are laid out; the same in host memory and in a slot.

    Attributes:
        parts: In the order of the experts module's parameters.
        dtype: The dtype that runs; all parts share it.
        num_bytes: Bytes of a record, parts padded to `ALIGNMENT`. One copy moves exactly this.
    """

    parts: tuple[Part, ...]
    dtype: torch.dtype
    num_bytes: int

    def views(self, records: torch.Tensor, num_records: int) -> dict[str, torch.Tensor]:
        """Return each part of `num_records` consecutive records as one strided tensor.

        Args:
            records: uint8 [num_records × num_bytes], host or device.
            num_records: How many records it holds.

        Returns:
            Part name → tensor [num_records, *part.shape] of `dtype`, sharing memory.
        """
        typed = records.view(self.dtype)
        size = self.dtype.itemsize
        return {
            part.name: torch.as_strided(
                typed,
                (num_records, *part.shape),
                (self.num_bytes // size, *_row_major(part.shape)),
                typed.storage_offset() + part.offset // size,
            )
            for part in self.parts
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous run of a file that belongs into a record.

    Attributes:
        file: The shard.
        offset: Bytes from the start of the shard.
        num_bytes: Bytes in the shard.
        dtype: The dtype in the shard; converted on the way in when it is not the record's.
        record_offset: Bytes from the start of the record.
    """

    file: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    record_offset: int

    @property
    def num_elements(self) -> int:
        """Elements of the run."""
        return self.num_bytes // self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecordSource:
    """Where the bytes of one record come from. `num_bytes` is what is read from the files, before any conversion."""

    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes read from files for this record."""
        return sum(piece.num_bytes for piece in self.pieces)


def pack(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> RecordLayout:
    """Lay out one expert's tensors one after another, each on an `ALIGNMENT` boundary.

    Args:
        shapes: Part name → shape without the expert dimension, in order.
        dtype: The dtype that runs.
    """
    parts, offset = [], 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        parts.append(Part(name, tuple(shape), offset, num_bytes))
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return RecordLayout(tuple(parts), dtype, offset)


def torch_dtype(name: str) -> torch.dtype | None:
    """Return torch's dtype for a safetensors dtype name, or None where torch has no plain equivalent."""
    return _DTYPES.get(name)


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
