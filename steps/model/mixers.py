"""Recurrent layers by the one-token rule: each row alone, with the state that the row before it left."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.gated_delta import GatedDeltaWeights, gated_delta_row
from .cache import StateLayer
from .rows import ActiveForward, DecodeRows, PrefillRows, States

__all__ = ["RowwiseMixer", "find_mixers"]


def find_mixers(model: torch.nn.Module, layers: list[int]) -> dict[int, torch.nn.Module]:
    """Find the recurrent module of each of these layers: the one that carries the layer's number."""
    found: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        if number in layers and hasattr(module, "conv1d"):
            found[int(number)] = module
    return found


class RowwiseMixer:
    """Stands in for a recurrent module's `forward`; calls it once per decode row.

    A decode row sees exactly what it would see without companions: the state after the row before it, a batch of one.

    Args:
        number: Layer number.
        module: The module; its class's own forward does the computing.
        layer: Its layer in the cache.
        active: The forward that is being computed.
        weights: The module's weights where `gated_delta_row` computes a row of it; None: the module does.
    """

    def __init__(
        self,
        number: int,
        module: torch.nn.Module,
        layer: StateLayer,
        active: ActiveForward,
        weights: GatedDeltaWeights | None,
    ) -> None:
        self._number, self._layer, self._active, self._weights = number, layer, active, weights
        self._forward = module.forward

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return [batch, length, hidden], as the module's own forward does."""
        rows = self._active.rows
        if isinstance(rows, DecodeRows):
            return self._decode(rows, hidden_states, args, kwargs)
        if isinstance(rows, PrefillRows):
            self._layer.load(rows.sequence.states.get(self._number) if rows.start else None)
        out: torch.Tensor = self._forward(hidden_states, *args, **kwargs)
        if isinstance(rows, PrefillRows):
            rows.sequence.states[self._number] = self._layer.take()
        return out

    def _decode(self, rows: DecodeRows, hidden: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        outs = []
        for number in range(len(rows.rows)):
            conv, recurrent = self._before(rows, number)
            if self._weights is not None:
                out, *after = gated_delta_row(hidden[number], conv, recurrent, self._weights)
                outs.append(out[None])
                rows.after[number][self._number] = after[0], after[1]
                continue
            self._layer.load((conv.clone(), recurrent))  # the module's one-token rule shifts the window in place
            outs.append(self._forward(hidden[number : number + 1], *args, **kwargs))
            rows.after[number][self._number] = self._layer.take()
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _before(self, rows: DecodeRows, number: int) -> States:
        previous = rows.after[number - 1].get(self._number) if number else None
        sequence = rows.rows[number].sequence
        if number and rows.rows[number - 1].sequence is sequence and previous is not None:
            return previous
        return sequence.states[self._number]
