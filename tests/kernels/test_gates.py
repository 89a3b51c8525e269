"""Which gates are recognised, by what they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from expertstream.kernels.experts import ExpertShape
from expertstream.kernels.gates import (
    CLAMPED_SWIGLU,
    CONCATENATED,
    GELU_TANH,
    INTERLEAVED,
    NONE,
    RELU_SQUARED,
    SILU,
    UNFUSED,
    FusedGate,
    recognise_gate,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Clamped:
    """A module's gate with bounds of its own, as gpt-oss has them."""

    limit, alpha = 5.0, 1.3

    def apply_gate(self, up: torch.Tensor) -> torch.Tensor:
        gate, value = up[..., ::2], up[..., 1::2]
        gate = gate.clamp(min=None, max=self.limit)
        value = value.clamp(min=-self.limit, max=self.limit)
        return (value + 1) * (gate * torch.sigmoid(gate * self.alpha))


def silu_gate(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    return torch.as_tensor(torch.nn.SiLU()(gate) * value)


def gelu_gate(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * value


def exact_gelu_gate(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    return functional.gelu(gate) * value


def limited_silu_gate(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    return functional.silu(gate.clamp(max=10.0)) * value.clamp(-10.0, 10.0)


def wide_silu_gate(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    return (functional.silu(gate.float()) * value.float()).to(up.dtype)


def relu_squared(up: torch.Tensor) -> torch.Tensor:
    return torch.square(functional.relu(up))


def recognised(activate: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, up: int = 64) -> FusedGate:
    return recognise_gate(ExpertShape("gate_up_proj", False, False, activate), up, 32, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_that_kernels_know_are_recognised(dtype: torch.dtype) -> None:
    """A gate is known by its bits; bounds come from the module that owns it."""
    assert recognised(silu_gate, dtype) == FusedGate(CONCATENATED, SILU)
    assert recognised(gelu_gate, dtype) == FusedGate(CONCATENATED, GELU_TANH)
    assert recognised(Clamped().apply_gate, dtype) == FusedGate(INTERLEAVED, CLAMPED_SWIGLU, 5.0, 1.3)
    assert recognised(functional.silu, dtype, up=32) == FusedGate(NONE, SILU)
    assert recognised(relu_squared, dtype, up=32) == FusedGate(NONE, RELU_SQUARED)


@pytest.mark.parametrize("activate", [exact_gelu_gate, limited_silu_gate])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_that_are_only_similar_keep_their_own_function(
    dtype: torch.dtype, activate: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A bound that is rarely reached, or another approximation, is not what the kernel computes."""
    assert recognised(activate, dtype) == UNFUSED
    assert recognised(torch.tanh, dtype, up=32) == UNFUSED


def test_gate_that_rounds_elsewhere_keeps_its_own_function() -> None:
    """The same formula in float32 inside has other bits in bfloat16."""
    assert recognised(wide_silu_gate, torch.bfloat16) == UNFUSED
