"""What a forward computes: the rows of a prefill chunk or of a decode step, and the sequences they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...memory.kv_pages import PagePool, PageTable

__all__ = ["ActiveForward", "DecodeRows", "PrefillRows", "Row", "Sequence"]

States = tuple[torch.Tensor, torch.Tensor]
"""Convolution state [1, channels, kernel] and recurrent state [1, heads, key_dim, value_dim] of one layer."""


@dataclass(slots=True)
class Sequence:
    """One request's memory in one model: pages of KV, and a state per recurrent layer.

    Attributes:
        table: Its pages.
        states: Layer → state after `num_tokens` positions.
        num_tokens: Positions computed and kept.
    """

    table: PageTable = field(default_factory=PageTable)
    states: dict[int, States] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Consecutive positions of one sequence, computed as one sequence."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Row:
    """One position of one sequence, computed by the one-token rule."""

    sequence: Sequence
    position: int


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of a decode step, each by the one-token rule.

    Attributes:
        rows: Rows of one sequence are consecutive positions, in order.
        after: Per row, layer → state after it.
    """

    rows: tuple[Row, ...]
    after: tuple[dict[int, States], ...]

    def keep(self, sequence: Sequence, count: int) -> None:
        """Accept the first `count` rows of a sequence: its length and states are those after them."""
        own = [number for number, row in enumerate(self.rows) if row.sequence is sequence]
        if count:
            sequence.states = {**sequence.states, **self.after[own[count - 1]]}
            sequence.num_tokens = self.rows[own[count - 1]].position + 1


class ActiveForward:
    """The forward that a model is in the middle of. One per model; set by its forwards, read by what is plugged in.

    Attributes:
        rows: What is being computed; None is a whole sequence without a cache (dense, replay).
        pool: KV pages of the model being computed.
        is_stopped: The engine is closing: the forward ends at its next look-up.
    """

    def __init__(self, pool: PagePool) -> None:
        self.rows: PrefillRows | DecodeRows | None = None
        self.pool = pool
        self.is_stopped = False
