"""Experts over slots: rows grouped by expert, two products per expert, outputs combined in the router's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .linear import choose_linear

__all__ = ["ExpertRows", "ExpertShape", "Slots", "combine", "group_rows", "run_experts"]

Slots = Sequence[torch.Tensor] | torch.Tensor
"""One part of every slot: a tensor [num_slots, …], or its slices, which are quicker to pick from."""


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
    parts: Mapping[str, Slots],
    shape: ExpertShape,
    row_multiple: int,
    out: torch.Tensor,
) -> None:
    """Compute experts that are in slots and store each (row, rank) pair's output.

    Args:
        hidden: [rows, hidden], the device of the slots. Rows beyond those of `out` are padding: copies of the first.
        top_k: Experts per row.
        groups: (rows of an expert, its slot).
        parts: Part name → a tensor per slot.
        shape: How the module computes.
        row_multiple: Every product gets a multiple of this many rows, filled up with copies.
        out: [num_rows × top_k, hidden], written at the pairs of `groups` only.

    Stream:
        Everything is enqueued on the current stream.
    """
    if out.shape[0] == top_k and hidden.shape[0] == row_multiple:
        _run_one_row(hidden, groups, parts, shape, out)
        return
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
    numbers = torch.tensor(rows + kept + pairs, device=hidden.device)
    x = hidden.index_select(0, numbers[: len(rows)])
    up = _products([(x[start:end], slot) for start, end, slot in bounds], parts, shape.up_name, shape)
    act = shape.activate(up)
    down = _products([(act[start:end], slot) for start, end, slot in bounds], parts, "down_proj", shape)
    if len(kept) < len(rows):
        down = down.index_select(0, numbers[len(rows) : len(rows) + len(kept)])
    out.index_copy_(0, numbers[len(rows) + len(kept) :], down)


def _run_one_row(
    hidden: torch.Tensor,
    groups: Sequence[tuple[ExpertRows, int]],
    parts: Mapping[str, Slots],
    shape: ExpertShape,
    out: torch.Tensor,
) -> None:
    """Do the same for a single row and its padding: every expert gets the rows as they are, nothing is gathered."""
    count = hidden.shape[0]
    act = shape.activate(_products([(hidden, slot) for _, slot in groups], parts, shape.up_name, shape))
    blocks = act.view(len(groups), count, -1)
    down = _products([(block, slot) for block, (_, slot) in zip(blocks, groups)], parts, "down_proj", shape)[::count]
    pairs = [group.pairs[0] for group, _ in groups]
    if pairs == list(range(out.shape[0])):
        out.copy_(down)
    else:
        out[pairs] = down


def _products(
    blocks: Sequence[tuple[torch.Tensor, int]], parts: Mapping[str, Slots], name: str, shape: ExpertShape
) -> torch.Tensor:
    """Multiply each block of rows by its slot's weight; return the results one under the other."""
    weights = parts[name]
    product = _transposed if shape.is_transposed else choose_linear(weights[0])
    outs = [product(rows, weights[slot]) for rows, slot in blocks]
    if shape.has_bias:
        biases = parts[name + "_bias"]
        outs = [out + biases[slot] for out, (_, slot) in zip(outs, blocks)]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _transposed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows @ weight


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
