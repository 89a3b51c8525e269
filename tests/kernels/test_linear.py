"""Products whose rows do not depend on the rows beside them."""

from __future__ import annotations

import pytest
import torch

from expertstream.kernels import linear as module
from expertstream.kernels.linear import ONEDNN_MIN_ELEMENTS, linear, prefers_onednn, probe_row_multiple

SHAPES = [(8, 16), (48, 40), (33, 17), (100, 96), (384, 512)]


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_is_the_product_whichever_way_it_goes(shape: tuple[int, int], with_bias: bool) -> None:
    """Small weights and those that go to oneDNN give x · weightᵀ + bias, for any leading dimensions."""
    weight, x = _random(*shape), _random(2, 3, shape[1], seed=1)
    bias = _random(shape[0], seed=2) if with_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = linear(x, weight, bias)
    assert out.shape == (2, 3, shape[0])
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


def test_large_float32_weights_on_the_cpu_prefer_onednn_where_the_build_has_it() -> None:
    """Where a product goes depends on its weight and the build only, never on the rows."""
    has_it = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    large = torch.zeros(ONEDNN_MIN_ELEMENTS // 64, 64)
    assert not prefers_onednn(large[:-1])
    assert not prefers_onednn(large.bfloat16())
    assert prefers_onednn(large) <= has_it


def test_build_without_onednn_uses_the_default_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without oneDNN computes the same product another way."""
    monkeypatch.setattr(module, "_has_onednn_linear", lambda: False)
    weight, x = _random(384, 512), _random(4, 512, seed=1)
    assert not prefers_onednn(weight)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_row_in_the_probed_multiple_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    """Contract 2.9: with rows padded to the probed multiple, a row's bits do not change with its companions."""
    multiple = probe_row_multiple([shape], torch.float32)
    assert multiple in (4, 8, 16)
    assert multiple is not None
    weight, row = _random(*shape), _random(shape[1], seed=1)
    alone = linear(row.expand(multiple, -1).contiguous(), weight)[0]
    for num_rows in (multiple, 2 * multiple, 5 * multiple, 8 * multiple):
        for place in (0, 1, num_rows - 1):
            company = _random(num_rows, shape[1], seed=num_rows)
            company[place] = row
            assert torch.equal(linear(company, weight)[place], alone), f"row {place} of {num_rows}"


def test_probe_takes_the_smallest_multiple_that_holds_for_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape that needs 8 makes it 8 for all; one that nothing helps makes it None."""

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        needs = {3: 8, 5: 99}.get(weight.shape[0], 1)  # a product whose bits change with rows that are no multiple
        return torch.nn.functional.linear(x.double(), weight.double()) + float(x.shape[0] % needs)

    monkeypatch.setattr(module, "linear", product)
    assert probe_row_multiple([(2, 4)], torch.float32) == 4
    assert probe_row_multiple([(2, 4), (3, 4)], torch.float32) == 8
    assert probe_row_multiple([(2, 4), (3, 4), (5, 4)], torch.float32) is None


def test_probe_of_nothing_is_the_smallest_multiple() -> None:
    """Without products there is nothing to hold for."""
    assert probe_row_multiple([], torch.float32) == 4
