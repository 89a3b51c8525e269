"""Experts over slots: rows grouped by expert, two products per expert, outputs combined in the router's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .linear import linear

__all__ = ["ExpertRows", "ExpertShape", "combine", "group_rows", "run_experts"]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """How an experts module computes, as its class declares it.

    Attributes:
        up_name: `gate_up_proj`, or `up_proj` where there is no gate.
        is_transposed: Weights are [in, out] rather than [out, in].
        has_bias: `<name>_bias` parts exist.
        activate: [n, up features] → [n, down features]: the module's own gate or activation.
    """

    up_name: str
    is_transposed: bool
    has_bias: bool
    activate: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Which rows chose an expert: `pairs[i]` is row × top_k + rank."""

    expert: int
    pairs: tuple[int, ...]


def group_rows(topk_ids: Sequence[Sequence[int]]) -> dict[int, ExpertRows]:
    """Group (row, rank) pairs by expert, experts in the router's order (first row first, then rank).

    Args:
        topk_ids: Per row its experts, best first.
    """
    groups: dict[int, list[int]] = {}
    pair = 0
    for row in topk_ids:
        for expert in row:
            groups.setdefault(expert, []).append(pair)
            pair += 1
    return {expert: ExpertRows(expert, tuple(pairs)) for expert, pairs in groups.items()}


def run_experts(
    hidden: torch.Tensor,
    top_k: int,
    groups: Sequence[tuple[ExpertRows, int]],
    parts: Mapping[str, torch.Tensor],
    shape: ExpertShape,
    row_multiple: int,
    out: torch.Tensor,
) -> None:
    """Compute experts that are in slots and store each (row, rank) pair's output.

    Args:
        hidden: [num_rows, hidden], the device of the slots.
        top_k: Experts per row.
        groups: (rows of an expert, its slot).
        parts: Part name → [num_slots, …] over the layer's slots.
        shape: How the module computes.
        row_multiple: Every product gets a multiple of this many rows, filled up with copies.
        out: [num_rows × top_k, hidden], written at the pairs of `groups` only.

    Stream:
        Everything is enqueued on the current stream.
    """
    rows: list[int] = []
    pairs: list[int] = []
    kept: list[int] = []
    bounds: list[tuple[int, int, int]] = []
    for group, slot in groups:
        start, count = len(rows), len(group.pairs)
        rows.extend(pair // top_k for pair in group.pairs)
        rows.extend(rows[start : start + 1] * (-count % row_multiple))
        pairs.extend(group.pairs)
        kept.extend(range(start, start + count))
        bounds.append((start, len(rows), slot))
    x = hidden.index_select(0, torch.tensor(rows, device=hidden.device))
    up = _products(x, bounds, parts, shape.up_name, shape)
    down = _products(shape.activate(up), bounds, parts, "down_proj", shape)
    out[torch.tensor(pairs, device=out.device)] = down.index_select(0, torch.tensor(kept, device=down.device))


def _products(
    x: torch.Tensor,
    bounds: Sequence[tuple[int, int, int]],
    parts: Mapping[str, torch.Tensor],
    name: str,
    shape: ExpertShape,
) -> torch.Tensor:
    weights = parts[name]
    biases = parts[name + "_bias"] if shape.has_bias else None
    outs = []
    for start, end, slot in bounds:
        weight, rows = weights[slot], x[start:end]
        product = rows @ weight if shape.is_transposed else linear(rows, weight)
        outs.append(product if biases is None else product + biases[slot])
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def combine(pair_outputs: torch.Tensor, topk_weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weigh and sum each row's expert outputs in the router's order, whatever order they were computed in.

    The sum is taken in the promoted dtype and cast last, which is what the grouped implementation of transformers does:
    in bfloat16 casting first changed logits by up to 1e-2.

    Args:
        pair_outputs: [num_rows × top_k, hidden].
        topk_weights: [num_rows, top_k].
        dtype: Of the result.

    Returns:
        [num_rows, hidden].
    """
    num_rows, top_k = topk_weights.shape
    weighted = pair_outputs * topk_weights.reshape(-1, 1)
    return weighted.view(num_rows, top_k, -1).sum(dim=1).to(dtype)
