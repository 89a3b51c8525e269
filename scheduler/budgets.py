"""How much memory experts may take, as a setting says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["HostBudget", "SlotBudget"]


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """How many experts may be resident on the device.

    Attributes:
        kind: "per_layer" (slots in each MoE layer), "bytes" (for the whole pool), "share" (of all experts) or "auto".
        amount: Slots, bytes, or a share between 0 and 1; 0 for "auto".
    """

    kind: Literal["auto", "per_layer", "bytes", "share"] = "auto"
    amount: int | float = 0

    def __str__(self) -> str:
        return f"{self.amount} per layer" if self.kind == "per_layer" else _budget_text(self.kind, self.amount)


@dataclass(frozen=True, slots=True)
class HostBudget:
    """How much host memory the expert records may take.

    Attributes:
        kind: "bytes", "share" (of the bytes of all experts) or "auto".
        amount: Bytes, or a share between 0 and 1; 0 for "auto".
    """

    kind: Literal["auto", "bytes", "share"] = "auto"
    amount: int | float = 0

    def __str__(self) -> str:
        return _budget_text(self.kind, self.amount)


def _budget_text(kind: str, amount: float) -> str:
    if kind == "auto":
        return "auto"
    return f"{amount * 100:g}%" if kind == "share" else f"{amount} bytes"
