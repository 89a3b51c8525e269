"""The kernels and grouped products over slots against their plain-torch twin, with every output poisoned first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
import torch

from expertstream.kernels import experts
from expertstream.kernels.experts import ExpertRows, ExpertShape, group_rows
from expertstream.kernels.gates import (
    CLAMPED_SWIGLU,
    CONCATENATED,
    GELU_TANH,
    INTERLEAVED,
    NONE,
    RELU_SQUARED,
    SILU,
    FusedGate,
)
from expertstream.kernels.slot_experts import MAX_PAIRS, MAX_ROWS, SlotExperts
from expertstream.memory.records import pack

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
NUM_EXPERTS, NUM_SLOTS = 12, 9
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}

SILU_GATE = FusedGate(CONCATENATED, SILU)
GELU_GATE = FusedGate(CONCATENATED, GELU_TANH)
GPT_OSS = FusedGate(INTERLEAVED, CLAMPED_SWIGLU)


def own_gate(up: torch.Tensor) -> torch.Tensor:
    """Computes a gate that no kernel knows."""
    gate, value = up.chunk(2, dim=-1)
    return torch.tanh(gate) * value


@dataclass
class Case:
    """A layer in slots, some rows, and what the router chose for them."""

    layer: SlotExperts
    shape: ExpertShape
    parts: dict[str, torch.Tensor]
    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    groups: list[tuple[ExpertRows, int]]

    def poisoned(self) -> torch.Tensor:
        size = (self.topk_ids.numel(), self.hidden.shape[1])
        return torch.full(size, float("nan"), dtype=self.hidden.dtype, device=self.hidden.device)

    def run(self, *batches: list[tuple[ExpertRows, int]]) -> torch.Tensor:
        """Computes batches of groups one after the other; all groups at once by default."""
        out = self.poisoned()
        for groups in batches or (self.groups,):
            self.layer.run(self.hidden, self.topk_ids, groups, out)
        return out

    def twin(self) -> torch.Tensor:
        out = self.poisoned()
        top_k = self.topk_ids.shape[1]
        experts.run_experts(self.hidden, top_k, self.groups, self.parts, self.shape, out)
        return out


def make_case(
    activate: Callable[[torch.Tensor], torch.Tensor] = SILU_GATE,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_rows: int = 1,
    hidden: int = 128,
    inner: int = 48,
    top_k: int = 4,
    is_gated: bool = True,
    is_transposed: bool = False,
    has_bias: bool = False,
    chosen: list[list[int]] | None = None,
) -> Case:
    generator, random = torch.Generator().manual_seed(num_rows + hidden), Random(num_rows)
    up_name, up = ("gate_up_proj", 2 * inner) if is_gated else ("up_proj", inner)
    shapes = {up_name: (up, hidden), "down_proj": (hidden, inner)}
    if is_transposed:
        shapes = {name: (size[1], size[0]) for name, size in shapes.items()}
    if has_bias:
        shapes |= {up_name + "_bias": (up,), "down_proj_bias": (hidden,)}  # type: ignore[dict-item]
    layout = pack(shapes, dtype)
    records = torch.full((NUM_SLOTS * layout.num_bytes,), 0xFF, dtype=torch.uint8)  # padding reads as NaN
    for name, view in layout.views(records, NUM_SLOTS).items():
        scale = 1.0 if name.endswith("bias") else 2.0 * (view.shape[1] if is_transposed else view.shape[2]) ** -0.5
        view.copy_(torch.randn(view.shape, generator=generator) * scale)
    parts = layout.views(records.to(DEVICE), NUM_SLOTS)
    shape = ExpertShape(up_name, is_transposed, has_bias, activate)
    resident = random.sample(range(NUM_EXPERTS), NUM_SLOTS)  # slot → expert
    ids = chosen or [random.sample(resident, top_k) for _ in range(num_rows)]
    groups = [(rows, resident.index(expert)) for expert, rows in group_rows(ids).items()]
    weights = torch.softmax(torch.randn(num_rows, len(ids[0]), generator=generator), dim=-1)
    return Case(
        SlotExperts(parts, shape, NUM_EXPERTS),
        shape,
        parts,
        (torch.randn(num_rows, hidden, generator=generator)).to(dtype).to(DEVICE),
        torch.tensor(ids, device=DEVICE),
        weights.to(DEVICE),
        groups,
    )


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert not got.isnan().any()
    scale = float(expected.float().abs().max())
    torch.testing.assert_close(got.float(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 9, 17, 32])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_kernels_of_decode_rows_agree_with_the_twin(dtype: torch.dtype, num_rows: int) -> None:
    """Every pair's output is the twin's, for groups of one row and of many, and every element is written."""
    case = make_case(dtype=dtype, num_rows=num_rows)
    assert case.layer.has_kernels
    assert_close(case.run(), case.twin(), dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    ("activate", "is_gated"),
    [
        (SILU_GATE, True),
        (GELU_GATE, True),
        (GPT_OSS, True),
        (FusedGate(CONCATENATED, CLAMPED_SWIGLU, 1.5, 1.2), True),
        (FusedGate(NONE, SILU), False),
        (FusedGate(NONE, RELU_SQUARED), False),
        (own_gate, True),
        (torch.tanh, False),
    ],
)
def test_kernels_of_every_layout_agree_with_the_twin(
    activate: Callable[[torch.Tensor], torch.Tensor], is_gated: bool, is_transposed: bool, has_bias: bool
) -> None:
    """Gated or not, either weight layout, with and without biases, with a gate of the module's own in between."""
    options = {"is_gated": is_gated, "is_transposed": is_transposed, "has_bias": has_bias}
    case = make_case(activate, num_rows=6, **options)  # type: ignore[arg-type]
    assert case.layer.has_kernels
    assert_close(case.run(), case.twin(), torch.bfloat16)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (16, 8), (264, 24), (2048, 768), (520, 1032)])
def test_kernels_of_odd_sizes_agree_with_the_twin(hidden: int, inner: int, is_transposed: bool) -> None:
    """Sizes that fill no tile, no warp and no block are computed to the last element."""
    case = make_case(hidden=hidden, inner=inner, num_rows=3, is_transposed=is_transposed)
    assert case.layer.has_kernels
    assert_close(case.run(), case.twin(), torch.bfloat16)


def test_sizes_that_no_16_byte_load_reaches_are_computed_by_the_twin() -> None:
    """A layer that the kernels cannot read still runs, bit for bit as the twin."""
    case = make_case(hidden=36, inner=20, num_rows=3)
    assert not case.layer.has_kernels
    assert torch.equal(case.run(), case.twin())


def test_one_expert_chosen_by_every_row_is_computed_for_all_of_them() -> None:
    """A group wider than the rows of one pass is served in several."""
    first = Random(MAX_ROWS).sample(range(NUM_EXPERTS), NUM_SLOTS)[4]
    case = make_case(num_rows=MAX_ROWS, chosen=[[first]] * MAX_ROWS)
    assert_close(case.run(), case.twin(), torch.bfloat16)


def test_more_pairs_than_one_launch_holds_are_computed_in_several() -> None:
    """The words of a launch are bounded; a step is not."""
    resident = Random(MAX_ROWS).sample(range(NUM_EXPERTS), NUM_SLOTS)
    case = make_case(num_rows=MAX_ROWS, chosen=[resident * 2] * MAX_ROWS)
    assert case.topk_ids.numel() > MAX_PAIRS
    assert_close(case.run(), case.twin(), torch.bfloat16)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("activate", [SILU_GATE, own_gate])
@pytest.mark.parametrize("num_rows", [1, 4, 32, 100, 700])
def test_outputs_do_not_depend_on_what_is_computed_together(
    num_rows: int, activate: Callable[[torch.Tensor], torch.Tensor], is_transposed: bool
) -> None:
    """Contract 2.9: hits first and misses later, or all at once: the bits of every pair are the same."""
    case = make_case(activate, num_rows=num_rows, hidden=256, inner=128, is_transposed=is_transposed)
    together = case.run()
    assert not together.isnan().any()
    for split in (1, len(case.groups) // 2):
        assert torch.equal(case.run(case.groups[:split], case.groups[split:]), together)
    assert torch.equal(case.run(*([group] for group in reversed(case.groups))), together)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_decode_rows_do_not_depend_on_their_companions(is_transposed: bool) -> None:
    """A row's bits are the same alone and among others, whatever the width of the groups it is in."""
    case = make_case(num_rows=32, is_transposed=is_transposed)
    together = case.run().view(32, -1, case.hidden.shape[1])
    for row in (0, 13, 31):
        ids = case.topk_ids[row : row + 1]
        slots = {rows.expert: slot for rows, slot in case.groups}
        groups = [(rows, slots[expert]) for expert, rows in group_rows(ids.tolist()).items()]
        out = torch.full_like(together[row], float("nan"))
        case.layer.run(case.hidden[row : row + 1], ids, groups, out)
        assert torch.equal(out, together[row])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_rows", [33, 300])
def test_grouped_products_of_a_prefill_agree_with_the_twin(
    num_rows: int, dtype: torch.dtype, is_transposed: bool, has_bias: bool
) -> None:
    """Above the rows of the kernels every pair is computed by grouped products, each in its place."""
    activate = GPT_OSS if has_bias else SILU_GATE
    case = make_case(activate, dtype=dtype, num_rows=num_rows, is_transposed=is_transposed, has_bias=has_bias)
    assert_close(case.run(), case.twin(), dtype)


@pytest.mark.parametrize("num_rows", [1, 200])
def test_pairs_of_absent_experts_are_left_alone(num_rows: int) -> None:
    """Only the pairs of the given groups are written: the others belong to batches before or after."""
    case = make_case(num_rows=num_rows)
    out = case.run(case.groups[:2])
    written = [pair for rows, _ in case.groups[:2] for pair in rows.pairs]
    is_written = torch.zeros(out.shape[0], dtype=torch.bool, device=DEVICE)
    is_written[torch.tensor(written, device=DEVICE)] = True
    assert out[~is_written].isnan().all()
    assert not out[is_written].isnan().any()


def test_no_groups_write_nothing() -> None:
    """A batch of no experts is no work."""
    case = make_case(num_rows=2)
    assert case.run([]).isnan().all()


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "top_k"), [(1, 1), (1, 8), (5, 3), (200, 8)])
def test_combine_agrees_with_the_twin(num_rows: int, top_k: int, weights_dtype: torch.dtype) -> None:
    """Outputs are weighed and summed per row, rounding where the twin rounds."""
    case = make_case(num_rows=num_rows, top_k=top_k, hidden=264)
    pairs = case.run()
    weights = case.topk_weights.to(weights_dtype)
    got = case.layer.combine(pairs, weights, torch.bfloat16)
    expected = experts.combine(pairs, weights, torch.bfloat16)
    assert got.dtype == expected.dtype
    assert_close(got, expected, torch.bfloat16)


def test_combine_sums_in_the_order_of_the_ranks() -> None:
    """Float32 sums are taken rank after rank: the bits are those of a loop."""
    case = make_case(num_rows=4, top_k=8, dtype=torch.float32)
    pairs = case.run()
    expected = torch.zeros(4, case.hidden.shape[1], device=DEVICE)
    for rank in range(8):
        expected += pairs.view(4, 8, -1)[:, rank] * case.topk_weights[:, rank : rank + 1]
    assert torch.equal(case.layer.combine(pairs, case.topk_weights, torch.float32), expected)


def test_nan_in_an_expert_reaches_the_output() -> None:
    """A slot whose bytes are not there (0xFF reads as NaN) shows: no activation hides it."""
    for activate, is_gated in ((SILU_GATE, True), (GPT_OSS, True), (FusedGate(NONE, RELU_SQUARED), False)):
        case = make_case(activate, is_gated=is_gated)
        rows, slot = case.groups[0]
        case.parts[case.shape.up_name][slot].fill_(float("nan"))
        assert case.run()[rows.pairs[0]].isnan().all()
