"""Finds recurrent modules whose one-token rule `kernels.gated_delta` computes, and proves on each that it does."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...kernels.gated_delta import GatedDeltaWeights, gated_delta_row
from .cache import PagedCache

__all__ = ["take_weights"]

_NEEDED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias", "norm", "out_proj")

TOLERANCE = 1e-5
"""Largest difference over the largest value at which the two ways of computing a row count as the same."""


def take_weights(module: Any, number: int, cache: PagedCache) -> GatedDeltaWeights | None:
    """Return the weights for `gated_delta_row`, or None where the module is of another kind.

    The module's projections become views of one tensor, so that a row needs one product instead of four.

    Args:
        module: A recurrent module with its weights in place.
        number: Its layer number.
        cache: The model's cache.
    """
    if not all(hasattr(module, name) for name in _NEEDED) or module.conv1d.bias is not None:
        return None
    tensors = [*module.parameters()]
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in tensors) or module.activation != "silu":
        return None
    weights = GatedDeltaWeights(
        projections=_join([module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a]),
        conv=module.conv1d.weight.data[:, 0],
        decay=-module.A_log.data.exp(),
        dt_bias=module.dt_bias.data,
        norm=module.norm.weight.data,
        norm_eps=module.norm.variance_epsilon,
        out=module.out_proj.weight.data,
        num_k_heads=module.num_k_heads,
        num_v_heads=module.num_v_heads,
    )
    return weights if _agrees(module, number, cache, weights) else None


def _join(projections: list[torch.nn.Linear]) -> torch.Tensor:
    joined = torch.cat([projection.weight.data for projection in projections])
    start = 0
    for projection in projections:
        end = start + projection.weight.shape[0]
        projection.weight = torch.nn.Parameter(joined[start:end], requires_grad=False)
        start = end
    return joined


@torch.inference_mode()
def _agrees(module: Any, number: int, cache: PagedCache, weights: GatedDeltaWeights) -> bool:
    """Compare with the module's own forward on a random row: a transformers version that computes otherwise shows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, module.hidden_size, generator=generator)
    conv = torch.randn(1, *weights.conv.shape, generator=generator)
    state = torch.randn(1, weights.num_v_heads, module.head_k_dim, module.head_v_dim, generator=generator)
    layer = cache.state_layers()[number]
    layer.load((conv.clone(), state.clone()))
    keyword = next(name for name in inspect.signature(module.forward).parameters if name.startswith("cache"))
    wanted = (module.forward(x, **{keyword: cache})[0], *layer.take())
    got = gated_delta_row(x[0], conv, state, weights)
    return all(bool((a - b).abs().max() <= TOLERANCE * b.abs().max()) for a, b in zip(got, wanted))
