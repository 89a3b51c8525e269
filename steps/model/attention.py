"""Attention over pages: a decode row attends to exactly its own keys, a prefill chunk to its sequence's, causally."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .rows import ActiveForward, DecodeRows, PrefillRows

__all__ = ["PagedAttention", "choose_kernel"]

Kernel = Callable[..., tuple[torch.Tensor, Any]]


def choose_kernel(model: torch.nn.Module) -> Kernel:
    """Return the arithmetic transformers would use: SDPA where the class supports it, else the family's eager one."""
    if getattr(model, "_supports_sdpa", False):
        return sdpa_attention_forward
    eager: Kernel = sys.modules[type(model).__module__].eager_attention_forward
    return eager


class PagedAttention:
    """The attention function of one attention module.

    Args:
        module: The module; its `layer_idx` is the layer in the pool.
        kernel: The arithmetic.
        active: The forward that is being computed.
    """

    def __init__(self, module: torch.nn.Module, kernel: Kernel, active: ActiveForward) -> None:
        self._module, self._kernel, self._active = module, kernel, active
        self._layer = int(module.layer_idx)  # type: ignore[arg-type]

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, None]:
        window = options.get("sliding_window") or getattr(self._module, "sliding_window", None)
        rows = self._active.rows
        if isinstance(rows, DecodeRows):
            return self._decode(rows, query, window, options), None
        start = rows.start if isinstance(rows, PrefillRows) else 0
        mask = _causal_mask(query, key.shape[2], start, window, self._kernel is sdpa_attention_forward)
        return self._kernel(self._module, query, key, value, mask, **options)[0], None

    def _decode(
        self, rows: DecodeRows, query: torch.Tensor, window: int | None, options: dict[str, Any]
    ) -> torch.Tensor:
        outs = []
        for number, row in enumerate(rows.rows):
            end = row.position + 1
            start = max(0, end - window) if window else 0
            keys, values = self._active.pool.read(self._layer, row.sequence.table, start, end)
            keys, values = keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)
            outs.append(self._kernel(self._module, query[number : number + 1], keys, values, None, **options)[0])
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _causal_mask(
    query: torch.Tensor, num_keys: int, start: int, window: int | None, is_sdpa: bool
) -> torch.Tensor | None:
    """Return [1, 1, length, keys]: boolean for SDPA, additive otherwise; None where the kernel's own rule says it."""
    length = query.shape[2]
    if length == 1 and (not window or num_keys <= window):
        return None
    if is_sdpa and start == 0 and (not window or num_keys <= window):
        return None  # plain causal
    positions = torch.arange(start, start + length, device=query.device).unsqueeze(1)
    keys = torch.arange(num_keys, device=query.device).unsqueeze(0)
    visible = keys <= positions
    if window:
        visible &= keys > positions - window
    if is_sdpa:
        return visible[None, None]
    return torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)[None, None]
