"""The one-token rule of gated-delta-net layers: the module's own result, and only where it is that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import write_family
from tiny import TINY

import expertstream.steps.model.gated_delta as taking
from expertstream.kernels.gated_delta import gated_delta_row
from expertstream.scheduler.loading import Loaded, load
from expertstream.scheduler.settings import resolve


def opened(path: Any, **settings: object) -> Loaded:
    return load(
        path,
        resolve({"slots": "50%", **settings}, environ={}).settings,
        check_cancelled=lambda: None,
        on_progress=None,
        on_not_pinned=lambda reason: None,
        on_routing=None,
    )


@pytest.fixture
def model() -> Iterator[Any]:
    loaded = opened(TINY)
    yield loaded.built.model
    loaded.close()


def mixers(model: Any) -> list[Any]:
    return [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]


def test_every_recurrent_layer_of_the_shipped_checkpoint_takes_the_short_way(model: Any) -> None:
    """The probe at open agrees for each of them, and its projections are views of one tensor, not copies."""
    for module in mixers(model):
        weights = module.forward._weights
        assert weights is not None
        assert module.in_proj_z.weight.untyped_storage().data_ptr() == weights.projections.untyped_storage().data_ptr()


def test_a_module_that_computes_otherwise_keeps_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a row differs from the module's own, the module computes it."""
    right = gated_delta_row

    def wrong(*arguments: Any) -> Any:
        out, conv, state = right(*arguments)
        return out * 1.001, conv, state

    monkeypatch.setattr(taking, "gated_delta_row", wrong)
    loaded = opened(TINY)
    assert all(module.forward._weights is None for module in mixers(loaded.built.model))
    loaded.close()


def test_other_dtypes_and_other_classes_keep_their_own_forward(tmp_path: Any) -> None:
    """In bfloat16 the module's own bits are kept; a class with other projections is not taken for one of these."""
    halves = opened(TINY, dtype="bfloat16")
    other = opened(write_family("qwen3_next", tmp_path, initializer_range=0.1))
    for loaded in (halves, other):
        assert mixers(loaded.built.model)
        assert all(module.forward._weights is None for module in mixers(loaded.built.model))
        loaded.close()


def test_row_changes_none_of_the_states_it_is_given(model: Any) -> None:
    """A sequence's states stay what they were until the row is kept."""
    weights = mixers(model)[0].forward._weights
    conv, state = torch.randn(1, *weights.conv.shape), torch.randn(1, 4, 32, 32)
    before = conv.clone(), state.clone()
    gated_delta_row(torch.randn(1, 128), conv, state, weights)
    assert torch.equal(conv, before[0])
    assert torch.equal(state, before[1])
