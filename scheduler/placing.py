"""Where a model goes: which device, and how much of its memory and the host's the experts may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.cpu import CpuRuntime
from ..kernels.runtime import Runtime
from ..memory.arena import HostArena
from ..memory.arena_space import ArenaSpace
from ..memory.budget import InsufficientHostMemoryError, LayerNeed, plan_places, plan_slots
from ..memory.host_limits import available_host_bytes
from ..memory.reader import FileReader
from ..memory.store import ExpertStore
from ..steps.model.build import BuiltModel
from .errors import DeviceUnavailableError
from .settings import Settings
from .switches import throttle_bytes_per_s

if TYPE_CHECKING:
    from ..kernels.cuda import CudaRuntime

__all__ = ["Placed", "make_runtime", "place_experts"]

WORKSPACE_BYTES = 1 << 30
"""Left free on a GPU for activations and what libraries allocate."""


Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Placed:
    """The experts' two levels and what they were given.

    Attributes:
        num_slots: MoE layer → slots.
    """

    arena: HostArena
    store: ExpertStore
    num_slots: dict[int, int]


def make_runtime(device: str) -> Runtime:
    """Return the runtime of a device setting.

    Args:
        device: `auto` (the first GPU where there is one, else the CPU), `cpu`, `cuda` or `cuda:N`.

    Raises:
        DeviceUnavailableError: When a GPU is asked for, or found by `auto`, and torch or CuPy cannot use it.
    """
    throttle = throttle_bytes_per_s()
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return CpuRuntime(throttle_bytes_per_s=throttle)
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(
            f"device {device}: torch {torch.__version__} finds no GPU; device=cpu runs without one"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise DeviceUnavailableError(f"device {device}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    from ..kernels.cuda import CudaRuntime

    torch.cuda.set_device(index)  # for this thread, which is the one that computes
    try:
        return CudaRuntime(index, throttle_bytes_per_s=throttle)
    except RuntimeError as exc:
        raise DeviceUnavailableError(f"device {device}: {exc}") from exc


def place_experts(
    built: BuiltModel,
    settings: Settings,
    runtime: Runtime,
    reader: FileReader,
    *,
    kv_tokens: int,
    on_progress: Progress | None,
    on_not_pinned: Callable[[str], None],
) -> Placed:
    """Decide both budgets, then allocate the host arena and the slots.

    Args:
        built: The model; its dense part is in place.
        settings: Resolved.
        runtime: Of the device.
        reader: Reads the shards.
        kv_tokens: Tokens that the KV pools hold together.
        on_progress: See `HostArena`.
        on_not_pinned: Called with the reason, from a thread, when host memory cannot be page-locked.

    Raises:
        InsufficientSlotsError, InsufficientHostMemoryError: When a budget does not work; nothing was allocated.
        MemoryError: When an allocation is refused.
    """
    needs = [LayerNeed(x.number, x.num_experts, x.top_k, x.layout.num_bytes) for x in built.layers]
    host = available_host_bytes()
    places = plan_places(settings.host_memory.kind, settings.host_memory.amount, needs, available_bytes=host)
    arena_bytes = sum(size * count for size, count in places.items())
    if runtime.device.type == "cpu":  # slots and records share the same memory
        _check_kv(settings, _kv_bytes(built, kv_tokens), host)
        available, taken = (None if host is None else host - arena_bytes), {"expert records": arena_bytes}
    else:
        available, taken = _left_on_gpu(built, runtime, kv_tokens)  # type: ignore[arg-type]
    num_slots = plan_slots(settings.slots.kind, settings.slots.amount, needs, available_bytes=available, taken=taken)
    block = runtime.allocate_host(arena_bytes)
    if runtime.device.type != "cpu":
        on_progress = _pin_behind(runtime, block, on_progress, on_not_pinned)  # type: ignore[arg-type]
    layouts = {x.number: x.layout for x in built.layers}
    space = ArenaSpace(block, places)
    arena = HostArena(
        space, layouts, built.sources, reader, num_threads=settings.reader_threads, on_progress=on_progress
    )
    experts = {x.number: x.num_experts for x in built.layers}
    store = ExpertStore(runtime, arena, layouts, experts, num_slots, policy=settings.policy)
    return Placed(arena, store, num_slots)


def _check_kv(settings: Settings, kv_bytes: int, host_bytes: int | None) -> None:
    """Refuse a length that was asked for and whose KV pages no memory holds; `auto` takes pages as it comes to them."""
    if settings.max_model_len != "auto" and host_bytes is not None and kv_bytes > host_bytes:
        raise InsufficientHostMemoryError(
            f"max_model_len: the KV pages of {settings.max_model_len} tokens take {kv_bytes} bytes and {host_bytes} "
            f"bytes of host memory are available; set max_model_len lower."
        )


def _left_on_gpu(built: BuiltModel, runtime: CudaRuntime, kv_tokens: int) -> tuple[int, dict[str, int]]:
    """Return the bytes that slots may take, and what takes the rest. KV is allocated later, so it is set aside."""
    kv = _kv_bytes(built, kv_tokens)
    taken = {"dense weights": built.dense_bytes, "KV pages": kv, "workspace": WORKSPACE_BYTES}
    return runtime.free_device_bytes - kv - WORKSPACE_BYTES, taken


def _kv_bytes(built: BuiltModel, num_tokens: int) -> int:
    """Return what both pools will take if every layer caches keys and values of the config's head size."""
    config: Any = built.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in kinds) + (built.mtp is not None)
    return int(2 * layers * heads * dim * num_tokens * built.dtype.itemsize)


def _pin_behind(
    runtime: CudaRuntime, block: torch.Tensor, on_progress: Progress | None, on_not_pinned: Callable[[str], None]
) -> Progress:
    """Page-lock the arena behind the readers; return the progress callback that tells how far they are."""
    pinning = runtime.start_registering(block, on_not_pinned, follows=True)

    def progress(done: int, total: int) -> None:
        pinning.note_progress(done, total)
        if on_progress is not None:
            on_progress(done, total)

    return progress
