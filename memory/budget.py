"""How many slots and host places a budget gives: decided before anything is allocated, never above the ceiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["InsufficientHostMemoryError", "InsufficientSlotsError", "LayerNeed", "plan_places", "plan_slots"]


@dataclass(frozen=True, slots=True)
class LayerNeed:
    """What one MoE layer asks of a budget.

    Attributes:
        number: MoE layer number.
        num_experts: Experts of the layer.
        top_k: Experts one token uses: fewer slots cannot serve a token.
        record_bytes: Bytes of one record.
    """

    number: int
    num_experts: int
    top_k: int
    record_bytes: int


class InsufficientSlotsError(ValueError):
    """Raised when a slot budget cannot serve one token, or exceeds the memory there is; no slot was allocated."""


class InsufficientHostMemoryError(ValueError):
    """Raised when a host budget cannot hold the records of one token, or exceeds the memory there is."""


def plan_slots(
    kind: str, amount: float, layers: Sequence[LayerNeed], *, available_bytes: int | None, taken: Mapping[str, int]
) -> dict[int, int]:
    """Give every MoE layer its slots.

    A byte budget and a share are ceilings: every layer gets its top-k and then the same number more, what is left goes
    one by one to the first layers, and no layer gets more slots than it has experts.

    Args:
        kind: "per_layer" (slots in each layer), "bytes" (of the whole pool), "share" (of all experts) or "auto" (every
            expert if it fits in 90 % of what is available, else what fits; the least that works may take more).
        amount: Slots, bytes, or a share between 0 and 1.
        layers: All MoE layers.
        available_bytes: Memory of the device that slots may take; None when it is not known.
        taken: What else takes memory there, in bytes by name; for the message.

    Returns:
        MoE layer → slots.

    Raises:
        InsufficientSlotsError: When a layer would get fewer slots than top-k, or the slots exceed `available_bytes`.
    """
    everything = sum(need.num_experts * need.record_bytes for need in layers)
    if kind == "auto":
        ceiling = everything if available_bytes is None else min(everything, available_bytes * 9 // 10)
        if available_bytes is not None and ceiling < _least_bytes(layers) <= available_bytes:
            ceiling = _least_bytes(layers)
        slots = _spread(ceiling, layers)
    elif kind == "bytes":
        slots = _spread(int(amount), layers)
    elif kind == "share":
        slots = {need.number: min(need.num_experts, int(need.num_experts * amount + 1e-9)) for need in layers}
    else:
        slots = {need.number: min(need.num_experts, int(amount)) for need in layers}
    _check_slots(slots, layers, available_bytes, taken)
    return slots


def plan_places(
    kind: str, amount: float, layers: Sequence[LayerNeed], *, available_bytes: int | None
) -> dict[int, int]:
    """Give every record size its places in the host arena.

    Args:
        kind: "auto" (every expert), "bytes" or "share" (of the bytes of all experts).
        amount: Bytes, or a share between 0 and 1.
        layers: All MoE layers.
        available_bytes: Host memory there is; None when it is not known.

    Returns:
        Record bytes → places, largest records last; at most as many as there are experts of that size.

    Raises:
        InsufficientHostMemoryError: When the places cannot hold one token's records, or exceed `available_bytes`.
    """
    totals: dict[int, int] = {}
    for need in sorted(layers, key=lambda need: need.record_bytes):
        totals[need.record_bytes] = totals.get(need.record_bytes, 0) + need.num_experts
    everything = sum(size * count for size, count in totals.items())
    ceiling = {"auto": everything, "bytes": int(amount), "share": int(everything * amount)}[kind]
    # In whole numbers: a rounded share would lose a place where the ceiling is exactly so many records.
    places = {size: min(count, count * ceiling // everything) for size, count in totals.items()}
    least = {size: max(need.top_k for need in layers if need.record_bytes == size) for size in totals}
    if any(places[size] < least[size] for size in places):
        smallest = max(-(-least[size] * everything // totals[size]) for size in totals)
        raise InsufficientHostMemoryError(
            f"host_memory: {ceiling} bytes hold {sum(places.values())} of {sum(totals.values())} expert records, fewer "
            f"than one token needs of a layer; the smallest setting that works is {smallest} bytes."
        )
    needed = sum(size * count for size, count in places.items())
    if available_bytes is not None and needed > available_bytes:
        raise InsufficientHostMemoryError(
            f"host_memory: the expert records take {needed} bytes and {available_bytes} bytes of host memory are "
            f"available; set host_memory below that, and the other records stay on disk."
        )
    return places


def _spread(ceiling: int, layers: Sequence[LayerNeed]) -> dict[int, int]:
    slots = {need.number: need.top_k for need in layers}
    left = ceiling - _least_bytes(layers)
    if left < 0:  # nothing works then; this is what the refusal says of it
        return {need.number: max(0, ceiling) // (len(layers) * need.record_bytes) for need in layers}
    while open_layers := [need for need in layers if slots[need.number] < need.num_experts]:
        row = sum(need.record_bytes for need in open_layers)
        rounds = min(left // row, min(need.num_experts - slots[need.number] for need in open_layers))
        if rounds == 0:
            break
        for need in open_layers:
            slots[need.number] += rounds
        left -= rounds * row
    for need in layers:
        if slots[need.number] < need.num_experts and need.record_bytes <= left:
            slots[need.number] += 1
            left -= need.record_bytes
    return slots


def _check_slots(
    slots: Mapping[int, int], layers: Sequence[LayerNeed], available_bytes: int | None, taken: Mapping[str, int]
) -> None:
    short = [need for need in layers if slots[need.number] < need.top_k]
    if short:
        worst = min(short, key=lambda need: slots[need.number])
        raise InsufficientSlotsError(
            f"slots: MoE layer {worst.number} would get {slots[worst.number]} slots, and one token uses {worst.top_k} "
            f"of its {worst.num_experts} experts; {_smallest(layers, available_bytes)}{_says(taken, available_bytes)}"
        )
    needed = sum(slots[need.number] * need.record_bytes for need in layers)
    if available_bytes is not None and needed > available_bytes:
        raise InsufficientSlotsError(
            f"slots: {sum(slots.values())} slots take {needed} bytes and {available_bytes} bytes are available; "
            f"{_smallest(layers, available_bytes)}{_says(taken, available_bytes)}"
        )


def _least_bytes(layers: Sequence[LayerNeed]) -> int:
    return sum(need.top_k * need.record_bytes for need in layers)


def _smallest(layers: Sequence[LayerNeed], available_bytes: int | None) -> str:
    least, top_k = _least_bytes(layers), max(need.top_k for need in layers)
    if available_bytes is not None and least > available_bytes:
        return f"no setting works: the least is {least} bytes for all {len(layers)} layers."
    settings = f"the smallest setting that works is {least} bytes for all {len(layers)} layers"
    per_layer = sum(min(need.num_experts, top_k) * need.record_bytes for need in layers)
    if available_bytes is None or per_layer <= available_bytes:
        settings += f", or {top_k} slots per layer"
    return f"{settings}." if available_bytes is None else f"{settings}; the largest is {available_bytes} bytes."


def _says(taken: Mapping[str, int], available_bytes: int | None) -> str:
    if not taken or available_bytes is None:
        return ""
    listed = ", ".join(f"{name} {size} bytes" for name, size in taken.items())
    return f" Of the device, {listed} are taken and {available_bytes} bytes are left for slots."
