"""Recognises a gate or activation by what it computes, so that a kernel may compute it along with its product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from .experts import ExpertShape

__all__ = ["FusedGate", "recognise_gate"]

NONE, CONCATENATED, INTERLEAVED = 0, 1, 2
IDENTITY, SILU, GELU_TANH, RELU_SQUARED, CLAMPED_SWIGLU = 0, 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class FusedGate:
    """What expert_rows.cu is compiled for.

    Attributes:
        gate: Its GATE: 0 none, 1 concatenated, 2 interleaved.
        activation: Its ACTIVATION: 0 none, 1 silu, 2 gelu (tanh), 3 relu squared, 4 clamped swiglu.
        limit: Bound of the clamped swiglu.
        alpha: Steepness of the clamped swiglu.
    """

    gate: int
    activation: int
    limit: float = 7.0
    alpha: float = 1.702

    @property
    def is_fused(self) -> bool:
        """Whether the kernel computes the gate; otherwise the module's own function runs between two products."""
        return self.activation != IDENTITY

    def __call__(self, up: torch.Tensor) -> torch.Tensor:
        """Compute the gate in plain torch, rounding where the kernel rounds: [n, up features] → [n, down features]."""
        if self.gate == NONE:
            return _ACTIVATIONS[self.activation](up)
        gate, value = up.chunk(2, dim=-1) if self.gate == CONCATENATED else (up[..., ::2], up[..., 1::2])
        if self.activation != CLAMPED_SWIGLU:
            return _ACTIVATIONS[self.activation](gate) * value
        gate, value = gate.clamp(max=self.limit), value.clamp(min=-self.limit, max=self.limit)
        return (value + 1) * (gate * torch.sigmoid(gate * self.alpha))


UNFUSED = FusedGate(NONE, IDENTITY)

_ACTIVATIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    IDENTITY: lambda x: x,
    SILU: functional.silu,
    GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    RELU_SQUARED: lambda x: torch.square(torch.relu(x)),
}


def recognise_gate(shape: ExpertShape, up_features: int, down_features: int, dtype: torch.dtype) -> FusedGate:
    """Return the gate that gives the very bits of `shape.activate` on rows that reach far out, else `UNFUSED`.

    It is tried, not read from names: a module with a gate of its own keeps it, whatever it is called.

    Args:
        shape: How the module computes.
        up_features: Of the up product.
        down_features: After the gate.
        dtype: The dtype that runs: two gates that round in different places are told apart.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.5, 3.0, 12.0, 100.0]).unsqueeze(1)
    rows = (torch.randn(4, up_features, generator=generator) * scales).to(dtype)
    wanted = shape.activate(rows)
    for gate in _candidates(shape, is_gated=up_features != down_features):
        if torch.equal(gate(rows), wanted):
            return gate
    return UNFUSED


def _candidates(shape: ExpertShape, *, is_gated: bool) -> Iterator[FusedGate]:
    if not is_gated:
        for activation in (SILU, RELU_SQUARED, GELU_TANH):
            yield FusedGate(NONE, activation)
        return
    yield FusedGate(CONCATENATED, SILU)
    yield FusedGate(CONCATENATED, GELU_TANH)
    module = getattr(shape.activate, "__self__", None)
    limit = _number(module, ("limit", "swiglu_limit"), 7.0)
    alpha = _number(module, ("alpha", "swiglu_alpha"), 1.702)
    yield FusedGate(INTERLEAVED, CLAMPED_SWIGLU, limit, alpha)
    yield FusedGate(CONCATENATED, CLAMPED_SWIGLU, limit, alpha)


def _number(module: object, names: tuple[str, ...], default: float) -> float:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int | float):
            return float(value)
    return default
