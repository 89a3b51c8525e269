"""Experts over slots: rows grouped by expert, two products per expert, outputs combined in the router's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .linear import Product, choose_linear

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
    out: torch.Tensor,
) -> None:
    """Compute experts that are in slots and store each (row, rank) pair's output.

    Args:
        hidden: [num_rows, hidden], the device of the slots.
        top_k: Experts per row.
        groups: (rows of an expert, its slot).
        parts: Part name → a tensor per slot.
        shape: How the module computes.
        out: [num_rows × top_k, hidden], written at the pairs of `groups` only.

    Stream:
        Everything is enqueued on the current stream.
    """
    pairs = [pair for group, _ in groups for pair in group.pairs]
    if hidden.shape[0] == 1:
        blocks = [(hidden, slot) for _, slot in groups]
    else:
        x = hidden[[pair // top_k for pair in pairs]]
        blocks = _cut(x, groups)
    up = _products(blocks, parts, shape.up_name, shape)
    # On the CPU an elementwise function's bits depend on where vectors and threads cut the tensor it gets, and how many
    # groups arrive together depends on residency. A GPU computes each element alike, and a launch per group costs.
    if up.is_cuda:
        act = _cut(shape.activate(up), groups)
    else:
        act = [(shape.activate(rows), slot) for rows, slot in _cut(up, groups)]
    down = _products(act, parts, "down_proj", shape)
    if pairs == list(range(out.shape[0])):
        out.copy_(down)
    else:
        out[pairs] = down


def _cut(rows: torch.Tensor, groups: Sequence[tuple[ExpertRows, int]]) -> list[tuple[torch.Tensor, int]]:
    """Cut rows that lie group after group into (rows of a group, its slot)."""
    sizes = [len(group.pairs) for group, _ in groups]
    return list(zip(torch.split(rows, sizes), [slot for _, slot in groups]))


def _products(
    blocks: Sequence[tuple[torch.Tensor, int]], parts: Mapping[str, Slots], name: str, shape: ExpertShape
) -> torch.Tensor:
    """Multiply each block of rows by its slot's weight; return the results one under the other."""
    weights = parts[name]
    product: Product = torch.matmul if shape.is_transposed else choose_linear(weights[0])
    outs = [product(rows, weights[slot]) for rows, slot in blocks]
    if shape.has_bias:
        biases = parts[name + "_bias"]
        outs = [out + biases[slot] for out, (_, slot) in zip(outs, blocks)]
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
