"""What is plugged into an unmodified transformers model: its experts function, its attention function, its mixers.

Functions are registered once per process, under names of our own; each module that they serve carries its plug.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["ATTENTION", "EXPERTS", "AttentionPlug", "ExpertsPlug", "plug_in", "register"]

ATTENTION = "expertstream"
EXPERTS = "expertstream"
_PLUG = "_expertstream_plug"


class ExpertsPlug(Protocol):
    """Serves one experts module."""

    def __call__(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, hidden] for hidden [num_rows, hidden], topk_ids and topk_weights [num_rows, top_k]."""


class AttentionPlug(Protocol):
    """Serves one attention module."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Return ([batch, length, heads, dim], None).

        Args:
            query: [batch, heads, length, dim].
            key: What the cache returned: [batch, kv_heads, keys, dim].
            value: The same for values.
            **options: The family's own: scaling, sliding_window, sinks.
        """


def register() -> None:
    """Register the two functions with transformers. Idempotent; changes nothing that other models use."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


def plug_in(module: torch.nn.Module, plug: ExpertsPlug | AttentionPlug) -> None:
    """Let a module be served by a plug."""
    setattr(module, _PLUG, plug)


def _experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    plug: ExpertsPlug = getattr(module, _PLUG)
    return plug(hidden_states, top_k_index, top_k_weights)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    # transformers makes no mask for an attention function that it does not know: causality is the plug's business.
    plug: AttentionPlug = getattr(module, _PLUG)
    return plug(query, key, value, **options)
