"""The experts function of one MoE layer: asks the store for what the router chose, computes it, combines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

import torch

from ...kernels.experts import ExpertRows, combine, group_rows, run_experts
from ...memory.store import ExpertStore
from .build import ExpertLayer
from .rows import ActiveForward, DecodeRows

__all__ = ["RECENT_ROWS", "StepStoppedError", "StreamedExperts"]

RECENT_ROWS = 64
"""A prefill's last rows: their experts are the ones that stay resident when a chunk wants more than there are slots."""

OVERLAP_MIN_BYTES = 1 << 20
"""From this record size on, residents compute while absentees are copied; below it, fewer products pay more."""

RoutingHook = Callable[[int, list[list[int]]], None]


class StepStoppedError(Exception):
    """Raised inside a forward when the engine is closing: the step ends as failed."""


class StreamedExperts:
    """Serves one experts module from the store.

    Args:
        layer: The layer.
        store: The store; its residency belongs to the thread that computes the forward.
        active: The forward that is being computed.
        on_routing: Called with (layer number, experts per row) before the look-up, when it is not None.
    """

    def __init__(
        self, layer: ExpertLayer, store: ExpertStore, active: ActiveForward, on_routing: RoutingHook | None = None
    ) -> None:
        self._layer, self._store, self._active, self._on_routing = layer, store, active, on_routing
        self._overlap = layer.layout.num_bytes >= OVERLAP_MIN_BYTES
        parts = store.parts(layer.number)
        if store.runtime.device.type == "cuda":
            from ...kernels.slot_experts import SlotExperts

            slots = SlotExperts(parts, layer.shape, layer.num_experts)
            self._run, self._combine = slots.run, slots.combine
        else:
            self._parts = {name: part.unbind(0) for name, part in parts.items()}
            self._run, self._combine = self._run_on_host, combine

    def __call__(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, hidden] for hidden [num_rows, hidden], topk_ids and topk_weights [num_rows, top_k]."""
        if self._active.is_stopped:
            raise StepStoppedError()
        rows = self._active.rows
        chosen: list[list[int]] = topk_ids.tolist()
        if self._on_routing is not None:
            self._on_routing(self._layer.number, chosen)
        groups = group_rows(chosen)
        # A scan is what passes through once: a prefill chunk, or a whole sequence without a cache.
        recent = None if isinstance(rows, DecodeRows) else {expert for row in chosen[-RECENT_ROWS:] for expert in row}
        pairs = hidden.new_empty((topk_ids.numel(), hidden.shape[1]))
        serving = self._store.serve(self._layer.number, list(groups), recent, overlap=self._overlap)
        with closing(iter(serving)) as batches:
            for leases in batches:
                self._run(hidden, topk_ids, [(groups[lease.expert], lease.slot) for lease in leases], pairs)
        return self._combine(pairs, topk_weights, hidden.dtype)

    def _run_on_host(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, groups: Sequence[tuple[ExpertRows, int]], out: torch.Tensor
    ) -> None:
        run_experts(hidden, topk_ids.shape[1], groups, self._parts, self._layer.shape, out)
