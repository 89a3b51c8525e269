"""A linear product whose rows do not depend on the other rows, as long as rows come in a probed multiple.

Measured (torch 2.13, x86-64): a row of a float32 product changes in its last bits with the number of rows, and not at
all while rows come in multiples of 4 or 8. `probe_row_multiple` finds the multiple for the shapes at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

__all__ = ["choose_linear", "linear", "prefers_onednn", "probe_row_multiple"]

ONEDNN_MIN_ELEMENTS = 1 << 17
"""Weights from this size on go to oneDNN: with 8 rows of 2048 → 1536 in float32 it took 0.46 ms against 1.08 ms of the
default product on an AMD EPYC with 2 cores, while below it the call itself costs more than it saves."""

PROBE_MAX_ELEMENTS = 1 << 24
"""Larger weights are probed with fewer output features: blocking in the reduction does not depend on those."""


@functools.cache
def _has_onednn_linear() -> bool:
    try:
        if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        x = torch.ones(4, 16)
        out = torch.ops.mkldnn._linear_pointwise(x, torch.ones(8, 16), None, "none", [], "")
        return bool(torch.equal(out, torch.full((4, 8), 16.0)))
    except (RuntimeError, AttributeError, NotImplementedError):  # a build without it: the default product serves
        return False


def prefers_onednn(weight: torch.Tensor) -> bool:
    """Whether `linear` sends products with this weight to oneDNN. Depends on nothing but the weight and the build."""
    return (
        weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and weight.numel() >= ONEDNN_MIN_ELEMENTS
        and _has_onednn_linear()
    )


def choose_linear(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return what `linear` does with weights like this one, without asking again at every call."""
    return _onednn_linear if prefers_onednn(weight) else torch.nn.functional.linear


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x · weightᵀ + bias.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], same dtype.
        bias: [out_features] or None.

    Returns:
        [..., out_features], same dtype. On the CPU in float32, a row's bits do not change with its companions as long
        as the rows come in multiples of what `probe_row_multiple` returned for this shape.
    """
    return choose_linear(weight)(x, weight, bias)


def probe_row_multiple(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int | None:
    """Find the smallest row multiple at which rows of these products do not depend on one another, on this CPU.

    Args:
        shapes: (out_features, in_features) of every product whose rows must not depend on their companions.
        dtype: The dtype that runs.

    Returns:
        4, 8 or 16; None when none of them holds for every shape.
    """
    generator = torch.Generator().manual_seed(0)
    distinct = sorted(set(shapes))
    for multiple in (4, 8, 16):
        if all(_holds(out, inner, dtype, multiple, generator) for out, inner in distinct):
            return multiple
    return None


def _holds(out: int, inner: int, dtype: torch.dtype, multiple: int, generator: torch.Generator) -> bool:
    out = max(1, min(out, PROBE_MAX_ELEMENTS // inner))
    weight = torch.randn(out, inner, generator=generator).to(dtype)
    x = torch.randn(3 * multiple, inner, generator=generator).to(dtype)
    alone = torch.cat([linear(row.expand(multiple, -1).contiguous(), weight)[:1] for row in x])
    return all(
        torch.equal(linear(x[start : start + rows], weight), alone[start : start + rows])
        for rows in (multiple, 2 * multiple, 3 * multiple)
        for start in range(0, 3 * multiple - rows + 1, multiple)
    )
