"""The transformers Cache over our pages and states: what a layer stores goes to the sequences of the active forward."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from .rows import ActiveForward, DecodeRows, PrefillRows, States

__all__ = ["PagedCache", "cache_kinds"]


def cache_kinds(config: Any) -> list[type]:
    """Return the cache layer class that transformers itself would use, layer by layer."""
    return [type(layer) for layer in DynamicCache(config=config).layers]


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one attention layer, in pages."""

    is_sliding = False

    def __init__(self, number: int, active: ActiveForward) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number, self._active = number, active

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool allocates at the first write."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [batch, kv_heads, length, dim]; return what the attention function is to see.

        For a prefill chunk that is every key of the sequence so far; a decode row's keys are read row by row by the
        attention function, so what was given is given back.
        """
        rows, pool = self._active.rows, self._active.pool
        if isinstance(rows, DecodeRows):
            for number, row in enumerate(rows.rows):
                key, value = key_states[number].transpose(0, 1), value_states[number].transpose(0, 1)
                pool.write(self._number, row.sequence.table, row.position, key, value)
            return key_states, value_states
        if not isinstance(rows, PrefillRows):
            raise RuntimeError("A KV cache is in use, but no prefill chunk and no decode row is being computed.")
        table = rows.sequence.table
        pool.write(self._number, table, rows.start, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        if rows.start == 0:
            return key_states, value_states
        keys, values = pool.read(self._number, table, 0, rows.start + rows.count)
        return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)

    def get_seq_length(self) -> int:
        """Return the tokens stored for the sequence of a prefill chunk; rows of a decode step differ, so 0 there."""
        rows = self._active.rows
        return rows.start if isinstance(rows, PrefillRows) else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return (keys, offset) as transformers asks for masks; ours are made by the attention function."""
        return self.get_seq_length() + int(query_length), 0

    def get_max_length(self) -> int:
        """Return −1: no bound that a mask would need."""
        return -1

    get_max_cache_shape = get_max_length


class StateLayer(LinearAttentionLayer):
    """Convolution and recurrent state of one layer for the rows of one call; kept by the sequences, not here."""

    def load(self, states: States | None) -> None:
        """Put states [rows, …] in place for one call; None starts from nothing."""
        conv, recurrent = states if states is not None else (None, None)
        self.conv_states[0], self.recurrent_states[0] = conv, recurrent
        is_loaded = states is not None
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = is_loaded
        self.has_previous_state[0] = is_loaded
        if conv is not None:
            self.conv_kernel_size[0] = conv.shape[-1]
            self.device, self.dtype = conv.device, conv.dtype  # type: ignore[assignment]

    def take(self) -> States:
        """Return the states after the call: [rows, …]."""
        conv, recurrent = self.conv_states[0], self.recurrent_states[0]
        if conv is None or recurrent is None:
            raise RuntimeError("A recurrent layer left no state: this cache layer kind is not supported.")
        return conv, recurrent

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keep the new state as it is; the old one may belong to a sequence and is never written to."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


class PagedCache(Cache):
    """One cache object per model, for every forward.

    Args:
        kinds: What `cache_kinds` returned.
        active: The forward that is being computed.

    Raises:
        NotImplementedError: When a layer caches in a way that is neither plain KV, windowed KV nor a recurrent state.
    """

    def __init__(self, kinds: list[type], active: ActiveForward) -> None:
        layers: list[Any] = []
        for number, kind in enumerate(kinds):
            if kind is LinearAttentionLayer:
                layers.append(StateLayer())
            elif kind in (DynamicLayer, DynamicSlidingWindowLayer):
                layers.append(PagedLayer(number, active))
            else:
                raise NotImplementedError(f"layer {number} caches as {kind.__name__}, which is not supported")
        super().__init__(layers=layers)

    def state_layers(self) -> dict[int, StateLayer]:
        """Return layer → its state, for the recurrent layers."""
        return {number: layer for number, layer in enumerate(self.layers) if isinstance(layer, StateLayer)}
