"""Which product a weight goes to, and that it is the product whichever way it goes."""

from __future__ import annotations

import pytest
import torch

from expertstream.kernels import linear as module
from expertstream.kernels.linear import LARGE_ELEMENTS, choose_linear

SHAPES = [(8, 16), (48, 40), (33, 17), (100, 96), (513, 512), (384, 1024)]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_the_product_whichever_way_it_goes(shape: tuple[int, int], with_bias: bool) -> None:
    """Small weights and those that go to oneDNN give x · weightᵀ + bias, for any leading dimensions."""
    weight, x = _random(*shape), _random(2, 3, shape[1], seed=1)
    bias = _random(shape[0], seed=2) if with_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = choose_linear(weight)(x, weight, bias)
    assert out.shape == (2, 3, shape[0])
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


def test_large_float32_weights_on_the_cpu_go_to_onednn_where_the_build_has_it() -> None:
    """Where a product goes depends on its weight and the build only, never on the rows."""
    default = torch.nn.functional.linear
    large = torch.zeros(LARGE_ELEMENTS, 1)
    assert choose_linear(large[:-1]) is default
    assert choose_linear(large.bfloat16()) is default
    has_it = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    assert (choose_linear(large) is not default) <= has_it


def test_build_without_onednn_uses_the_default_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without oneDNN computes the same product another way."""
    monkeypatch.setattr(module, "_has_onednn_linear", lambda: False)
    assert choose_linear(torch.zeros(LARGE_ELEMENTS, 1)) is torch.nn.functional.linear
