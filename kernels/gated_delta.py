"""One row of a gated-delta-net layer in few operations: the one-token rule of recurrent layers on the CPU.

The arithmetic is that of transformers' `Qwen3_5MoeGatedDeltaNet` for a single token with a state, in another order of
operations: its own reference path takes some sixty small operations and a convolution of 4 columns, which alone took
0.04 to 0.3 ms of a row (2 cores, shared), where the sum of four products takes 0.006 ms.

Source: S. Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464, equation 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from .linear import choose_linear

__all__ = ["GatedDeltaWeights", "gated_delta_row"]

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys before its root is taken."""


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    """A layer's weights, float32, CPU.

    Attributes:
        projections: [2 × keys + 2 × values + 2 × value heads, hidden]: query, key, value, z, b, a, one under the other.
        conv: [2 × keys + values, kernel].
        decay: [value heads]: −exp(A_log).
        dt_bias: [value heads].
        norm: [value dim].
        norm_eps: Of the gated norm.
        out: [hidden, values].
        num_k_heads: Heads of queries and keys; each serves num_v_heads / num_k_heads value heads.
        num_v_heads: Heads of values.
    """

    projections: torch.Tensor
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    out: torch.Tensor
    num_k_heads: int
    num_v_heads: int


def gated_delta_row(
    x: torch.Tensor, conv_state: torch.Tensor, state: torch.Tensor, weights: GatedDeltaWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute one row.

    Args:
        x: [1, hidden].
        conv_state: [1, channels, kernel]: the last inputs of the convolution, newest last.
        state: [1, value heads, key dim, value dim].
        weights: Of the layer.

    Returns:
        (out [1, hidden], conv_state after, state after); the given states are not changed.
    """
    v_heads, key_dim, value_dim = state.shape[1:]
    channels = weights.conv.shape[0]
    projected = choose_linear(weights.projections)(x, weights.projections)[0]
    window = torch.cat([conv_state[0, :, 1:], projected[:channels, None]], dim=1)
    mixed = silu((window * weights.conv).sum(1))
    keys = weights.num_k_heads * key_dim
    query_key = mixed[: 2 * keys].view(2, weights.num_k_heads, key_dim)
    query_key = query_key * torch.rsqrt((query_key * query_key).sum(-1, keepdim=True) + NORM_EPS)
    if weights.num_k_heads != v_heads:
        query_key = query_key.repeat_interleave(v_heads // weights.num_k_heads, dim=1)
    query, key = query_key[0, :, :, None] * key_dim**-0.5, query_key[1, :, :, None]
    value = mixed[2 * keys :].view(v_heads, value_dim)
    z, b, a = projected[channels:].split([v_heads * value_dim, v_heads, v_heads])  # type: ignore[no-untyped-call]
    decayed = state[0] * torch.exp(weights.decay * softplus(a + weights.dt_bias))[:, None, None]
    delta = (value - (decayed * key).sum(1)) * torch.sigmoid(b)[:, None]
    after = torch.addcmul(decayed, key, delta[:, None, :])
    read = (after * query).sum(1)
    normed = read * torch.rsqrt((read * read).mean(-1, keepdim=True) + weights.norm_eps) * weights.norm
    gated = normed * silu(z.view(v_heads, value_dim))
    return choose_linear(weights.out)(gated.view(1, -1), weights.out), window[None], after[None]
