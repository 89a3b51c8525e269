"""Experts over slots against a computation of one (row, expert) pair at a time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch

from expertstream.kernels.experts import ExpertRows, ExpertShape, combine, group_rows, run_experts

HIDDEN, INNER, NUM_EXPERTS, TOP_K, NUM_ROWS = 32, 24, 6, 3, 7


def _gated(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * value


def _case(
    *, is_transposed: bool = False, has_bias: bool = False, is_gated: bool = True
) -> tuple[ExpertShape, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    up_name, width = ("gate_up_proj", 2 * INNER) if is_gated else ("up_proj", INNER)
    parts = {
        up_name: torch.randn(NUM_EXPERTS, width, HIDDEN, generator=generator) / 6,
        "down_proj": torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator) / 5,
    }
    if is_transposed:
        parts = {name: part.transpose(1, 2).contiguous() for name, part in parts.items()}
    if has_bias:
        parts[up_name + "_bias"] = torch.randn(NUM_EXPERTS, width, generator=generator)
        parts["down_proj_bias"] = torch.randn(NUM_EXPERTS, HIDDEN, generator=generator)
    return ExpertShape(up_name, is_transposed, has_bias, _gated if is_gated else torch.nn.functional.silu), parts


def _routing(seed: int = 0, num_rows: int = NUM_ROWS) -> tuple[torch.Tensor, list[list[int]], torch.Tensor]:
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, HIDDEN, generator=generator)
    ids = [random.sample(range(NUM_EXPERTS), TOP_K) for _ in range(num_rows)]
    return hidden, ids, torch.softmax(torch.randn(num_rows, TOP_K, generator=generator), dim=-1)


def _naive(
    hidden: torch.Tensor,
    ids: list[list[int]],
    weights: torch.Tensor,
    shape: ExpertShape,
    parts: dict[str, torch.Tensor],
) -> torch.Tensor:
    out = torch.zeros(hidden.shape[0], HIDDEN, dtype=torch.float64)
    for row, experts in enumerate(ids):
        for rank, expert in enumerate(experts):
            x = hidden[row].double()
            for name in (shape.up_name, "down_proj"):
                weight = parts[name][expert].double()
                x = (weight.T if shape.is_transposed else weight) @ x
                x = x + parts[name + "_bias"][expert].double() if shape.has_bias else x
                x = shape.activate(x) if name == shape.up_name else x
            out[row] += x * weights[row, rank].double()
    return out


def _run(
    routed: tuple[torch.Tensor, list[list[int]], torch.Tensor],
    shape: ExpertShape,
    parts: dict[str, torch.Tensor],
    batches: Sequence[Sequence[int]],
) -> torch.Tensor:
    hidden, ids, weights = routed
    groups = group_rows(ids)
    pairs = torch.full((len(ids) * TOP_K, HIDDEN), float("nan"), dtype=hidden.dtype, device=hidden.device)
    for batch in batches:
        run_experts(hidden, TOP_K, [(groups[e], e) for e in batch], parts, shape, pairs)
    return combine(pairs, weights, torch.float32)


def test_group_rows_keeps_the_routers_order_of_experts_and_pairs() -> None:
    """Experts come first row first, then by rank; a pair is row × top_k + rank."""
    groups = group_rows([[5, 2], [2, 7], [5, 7]])
    assert list(groups) == [5, 2, 7]
    assert groups[5] == ExpertRows(5, (0, 4))
    assert groups[2] == ExpertRows(2, (1, 2))
    assert groups[7] == ExpertRows(7, (3, 5))
    assert group_rows([]) == {}


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("num_rows", [1, 13])
def test_experts_of_every_layout_equal_one_pair_at_a_time(
    is_transposed: bool, has_bias: bool, is_gated: bool, num_rows: int
) -> None:
    """Every declared layout computes what its weights say, for one row and for many."""
    shape, parts = _case(is_transposed=is_transposed, has_bias=has_bias, is_gated=is_gated)
    routed = _routing(num_rows=num_rows)
    out = _run(routed, shape, parts, [list(group_rows(routed[1]))])
    torch.testing.assert_close(out.double(), _naive(*routed, shape, parts), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_transposed", [True, False])
def test_experts_in_any_order_and_any_batches_give_the_same_bits(is_transposed: bool) -> None:
    """Contract 2.9: whatever the order and the passes in which experts arrive, not a bit of the output changes."""
    shape, parts = _case(is_transposed=is_transposed)
    routed = _routing()
    experts = list(group_rows(routed[1]))
    whole = _run(routed, shape, parts, [experts])
    random = Random(1)
    for _ in range(10):
        shuffled = random.sample(experts, len(experts))
        cut = random.randrange(1, len(experts))
        assert torch.equal(_run(routed, shape, parts, [shuffled]), whole)
        assert torch.equal(_run(routed, shape, parts, [shuffled[:cut], shuffled[cut:]]), whole)
        assert torch.equal(_run(routed, shape, parts, [[expert] for expert in shuffled]), whole)


def test_experts_in_any_slots_give_the_same_bits() -> None:
    """Contract 2.9: in which slot an expert lies changes nothing."""
    shape, parts = _case()
    hidden, ids, weights = _routing()
    groups = group_rows(ids)
    slots = dict(zip(range(NUM_EXPERTS), Random(5).sample(range(NUM_EXPERTS), NUM_EXPERTS)))
    moved = {name: torch.empty_like(part) for name, part in parts.items()}
    for name, part in parts.items():
        for expert, slot in slots.items():
            moved[name][slot] = part[expert]
    pairs = torch.full((NUM_ROWS * TOP_K, HIDDEN), float("nan"))
    run_experts(hidden, TOP_K, [(groups[e], slots[e]) for e in groups], moved, shape, pairs)
    assert torch.equal(
        combine(pairs, weights, torch.float32), _run((hidden, ids, weights), shape, parts, [list(groups)])
    )


def test_run_experts_writes_the_pairs_of_its_groups_only() -> None:
    """Computing one expert touches no other expert's outputs."""
    shape, parts = _case()
    hidden, ids, _ = _routing()
    group = group_rows(ids)[ids[0][0]]
    pairs = torch.full((NUM_ROWS * TOP_K, HIDDEN), -7.0)
    run_experts(hidden, TOP_K, [(group, group.expert)], parts, shape, pairs)
    others = [pair for pair in range(NUM_ROWS * TOP_K) if pair not in group.pairs]
    assert bool((pairs[others] == -7.0).all())
    assert not bool((pairs[list(group.pairs)] == -7.0).any())


def test_combine_sums_in_the_promoted_dtype_and_casts_last() -> None:
    """Outputs in bfloat16 with float32 weights are summed in float32: casting first would lose bits."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(4 * TOP_K, HIDDEN, generator=generator).bfloat16()
    weights = torch.softmax(torch.randn(4, TOP_K, generator=generator), dim=-1)
    out = combine(pairs, weights, torch.bfloat16)
    expected = (pairs.float().view(4, TOP_K, HIDDEN) * weights[..., None]).sum(1).bfloat16()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    cast_first = (pairs.view(4, TOP_K, HIDDEN) * weights.bfloat16()[..., None]).sum(1)
    assert not torch.equal(out, cast_first)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("is_gated", [True, False])
def test_many_rows_have_the_same_bits_whatever_arrives_together(num_threads: int, is_gated: bool) -> None:
    """Contract 2.9: vectors and threads cut an elementwise function's tensor by its size; that must not show."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        shape, parts = _case(is_gated=is_gated)
        routed = _routing(seed=3, num_rows=1500)
        experts = list(group_rows(routed[1]))
        whole = _run(routed, shape, parts, [experts])
        for cut in range(1, len(experts)):
            assert torch.equal(_run(routed, shape, parts, [experts[:cut], experts[cut:]]), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 1500])
def test_rows_on_a_gpu_have_the_same_bits_whatever_arrives_together(num_rows: int, dtype: torch.dtype) -> None:
    """Contract 2.9: on a GPU the groups that are there are activated together; that must not show."""
    shape, parts = _case()
    parts = {name: part.to("cuda", dtype) for name, part in parts.items()}
    hidden, ids, weights = _routing(seed=3, num_rows=num_rows)
    routed = hidden.to("cuda", dtype), ids, weights.to("cuda")
    experts = list(group_rows(ids))
    whole = _run(routed, shape, parts, [experts])
    for cut in range(1, len(experts)):
        assert torch.equal(_run(routed, shape, parts, [experts[:cut], experts[cut:]]), whole)
