"""How an expert's tensors lie in a record, and how the bytes of the files get there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stores import SHAPES, open_arena, write_records

from expertstream.kernels.runtime import ALIGNMENT
from expertstream.memory.arena import HostArena
from expertstream.memory.records import ExpertKey, pack, torch_dtype

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _read(arena: HostArena, key: ExpertKey) -> torch.Tensor:
    _, errors = arena.require([key])
    assert not errors
    return arena.record(key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_starts_every_part_and_record_on_the_alignment(dtype: torch.dtype) -> None:
    """Contract 2.2: a record is contiguous; its parts lie in order, each on the alignment, and nothing overlaps."""
    layout = pack({"gate_up_proj": (5, 7), "down_proj": (7, 3), "down_proj_bias": (7,)}, dtype)
    end = 0
    for part in layout.parts:
        assert part.offset % ALIGNMENT == 0
        assert end <= part.offset < end + ALIGNMENT
        end = part.offset + part.num_bytes
    assert [part.name for part in layout.parts] == ["gate_up_proj", "down_proj", "down_proj_bias"]
    assert layout.parts[0].num_bytes == 35 * dtype.itemsize
    assert layout.num_bytes % ALIGNMENT == 0
    assert end <= layout.num_bytes < end + ALIGNMENT


def test_pack_of_parts_that_fill_the_alignment_adds_no_padding() -> None:
    """A record has no byte more than its parts and their alignment need."""
    assert pack({"a": (16,), "b": (4, 8)}, torch.float32).num_bytes == 64 + 128


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_share_the_memory_of_their_record_and_no_other(dtype: torch.dtype) -> None:
    """Writing one part of one record through its view changes exactly its bytes."""
    layout = pack({"a": (3, 5), "b": (2, 7)}, dtype)
    block = torch.zeros(ALIGNMENT + 4 * layout.num_bytes, dtype=torch.uint8)
    views = layout.views(block[ALIGNMENT:], 4)
    assert views["a"].shape == (4, 3, 5)
    assert views["b"].dtype == dtype
    views["b"][2].fill_(1)
    begin = ALIGNMENT + 2 * layout.num_bytes + layout.parts[1].offset
    changed = block[begin : begin + layout.parts[1].num_bytes]
    assert torch.equal(changed.view(dtype), torch.ones(14, dtype=dtype))
    changed.zero_()
    assert not block.any()


def test_views_of_one_record_are_contiguous_and_aligned() -> None:
    """A product reads the same alignment wherever an expert lies."""
    layout = pack(SHAPES, torch.float32)
    views = layout.views(torch.zeros(3 * layout.num_bytes, dtype=torch.uint8), 3)
    for view in views.values():
        for record in view:
            assert record.is_contiguous()
            assert record.data_ptr() % ALIGNMENT == 0


def test_bfloat16_files_run_in_float32_exactly(tmp_path: Path) -> None:
    """Contract 5.6: records hold the dtype that runs; every bfloat16 value has one float32 value, and that is it."""
    records = write_records(tmp_path, {0: 4}, stored_dtype=torch.bfloat16)
    source = records.sources[ExpertKey(0, 0)]
    assert source.num_bytes == (48 + 24) * 2
    assert [piece.num_elements for piece in source.pieces] == [48, 24]
    with open_arena(records) as arena:
        for key, expected in records.expected.items():
            views = records.layouts[0].views(_read(arena, key), 1)
            for name, value in expected.items():
                assert views[name].dtype == torch.float32
                assert torch.equal(views[name][0], value)
                assert torch.equal(views[name][0].bfloat16().float(), value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_files_in_the_dtype_that_runs_arrive_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without a conversion the record holds the bytes of the files."""
    records = write_records(tmp_path, {0: 2}, dtypes={0: dtype})
    with open_arena(records) as arena:
        for key, expected in records.expected.items():
            views = records.layouts[0].views(_read(arena, key), 1)
            for name, value in expected.items():
                assert torch.equal(views[name][0].view(torch.uint8), value.view(torch.uint8))


def test_torch_dtype_of_a_name_torch_lacks_is_none() -> None:
    """A safetensors dtype without a plain torch equivalent is for the caller to refuse."""
    assert torch_dtype("BF16") == torch.bfloat16
    assert torch_dtype("F6_E2M3") is None
