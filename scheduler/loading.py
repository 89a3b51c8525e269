"""From a path and settings to everything an engine holds. Blocking; runs on the engine's step thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.linear import choose_linear
from ..kernels.runtime import Runtime
from ..memory.arena import HostArena
from ..memory.checkpoint import Checkpoint
from ..memory.errors import CheckpointError, shown
from ..memory.kv_pages import PagePool
from ..memory.reader import FileReader
from ..memory.store import ExpertStore
from ..steps.model.build import BuiltModel, build_model
from ..steps.model.experts import RoutingHook
from ..steps.model.forwards import Forwards
from ..steps.model.mtp import MtpHead
from ..steps.model.text import TextCodec
from .placing import make_runtime, place_experts
from .settings import Settings

__all__ = ["LoadCancelledError", "Loaded", "NotDeterministicError", "load"]

PAGE_SIZE = 16
"""Tokens per KV page."""

LONGEST_AUTO = 32_768
"""Tokens: what `max_model_len=auto` allows at most, whatever the model could do."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadCancelledError(Exception):
    """Raised inside `load` when the opening of the engine was cancelled."""


class NotDeterministicError(ValueError):
    """Raised when `deterministic` is asked for and this machine's products cannot give it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What an open engine holds. Closing order is that of `close`.

    Attributes:
        num_slots: MoE layer → slots.
        is_row_exact: Whether each decode row is computed by itself, so that its bits do not depend on other rows.
        max_model_len: Tokens of one request, prompt and generated together.
        end_ids: Token ids that end a generation.
    """

    checkpoint: Checkpoint
    reader: FileReader
    runtime: Runtime
    arena: HostArena
    store: ExpertStore
    forwards: Forwards
    built: BuiltModel
    pool: PagePool
    draft_pool: PagePool | None
    text: TextCodec
    num_slots: dict[int, int]
    is_row_exact: bool
    max_model_len: int
    end_ids: frozenset[int]

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self.built.model.config.get_text_config().vocab_size)

    @property
    def has_mtp(self) -> bool:
        """Whether the checkpoint has an MTP head to speculate with, loaded or not."""
        return MtpHead.is_in(self.checkpoint)

    def close(self) -> None:
        """Stop readers, copies and files; every part is tried, the first error is raised after all."""
        with ExitStack() as stack:
            stack.callback(self.reader.close)
            stack.callback(self.runtime.close)
            stack.callback(self.arena.close)


def load(
    path: str | os.PathLike[str],
    settings: Settings,
    *,
    check_cancelled: Callable[[], None],
    on_progress: Callable[[int, int], None] | None,
    on_not_pinned: Callable[[str], None],
    on_routing: RoutingHook | None,
) -> Loaded:
    """Open a checkpoint and build everything that runs it. What was started is stopped again when this raises.

    Args:
        path: The checkpoint's folder.
        settings: Resolved.
        check_cancelled: Raises when the opening was cancelled; called between the slow parts.
        on_progress: Called from reader threads with (bytes read, bytes to read) of the expert records.
        on_not_pinned: Called with the reason, from a thread, when host memory cannot be page-locked.
        on_routing: See `StreamedExperts`.

    Raises:
        CheckpointError: When the checkpoint cannot be used.
        InsufficientSlotsError, InsufficientHostMemoryError: When a budget does not work.
        NotDeterministicError: When `deterministic` cannot be had.
        MemoryError: When an allocation is refused.
    """
    checkpoint = Checkpoint.open(path)
    with ExitStack() as undo:
        reader = FileReader()
        undo.callback(reader.close)
        runtime = make_runtime(settings.device)
        undo.callback(runtime.close)
        is_row_exact = _is_row_exact(settings, runtime.device)
        dtype = _run_dtype(settings, runtime.device)
        built = build_model(
            checkpoint,
            reader,
            dtype=dtype,
            device=runtime.device,
            with_mtp=settings.speculate > 0,
            check_cancelled=check_cancelled,
        )
        check_cancelled()
        end_ids = _end_ids(checkpoint)
        max_model_len = _max_model_len(checkpoint, built.model.config, settings)
        num_pages = -(-(max_model_len + settings.speculate + 1) // PAGE_SIZE)
        placed = place_experts(
            built,
            settings,
            runtime,
            reader,
            kv_tokens=num_pages * PAGE_SIZE,
            on_progress=on_progress,
            on_not_pinned=on_not_pinned,
        )
        arena, store, num_slots = placed.arena, placed.store, placed.num_slots
        undo.callback(arena.close)
        pool = PagePool(num_pages, PAGE_SIZE)
        draft_pool = PagePool(num_pages, PAGE_SIZE) if built.mtp is not None else None
        forwards = Forwards(built, store, pool, draft_pool, on_routing)
        _use_fast_products(built)  # last: a recurrent layer may have put its projections into one tensor
        text = TextCodec(checkpoint)
        loaded = Loaded(
            checkpoint, reader, runtime, arena, store, forwards, built, pool, draft_pool, text, num_slots,
            is_row_exact, max_model_len, end_ids,
        )  # fmt: skip
        arena.start()
        undo.pop_all()  # last: whatever raises before it leaves nothing behind
    return loaded


def _run_dtype(settings: Settings, device: torch.device) -> torch.dtype | None:
    """Return the dtype that runs; None is the checkpoint's own."""
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    return torch.float32 if device.type == "cpu" else None


def _use_fast_products(built: BuiltModel) -> None:
    """Send the dense part's products the way the experts' go where that is not torch's default."""
    for root in (built.model, built.mtp):
        for module in root.modules() if root is not None else ():
            if type(module) is torch.nn.Linear and choose_linear(module.weight) is not torch.nn.functional.linear:
                module.forward = _fast_forward(module)  # type: ignore[method-assign,assignment]


def _fast_forward(module: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    product, weight, bias = choose_linear(module.weight), module.weight, module.bias
    return lambda input: product(input, weight, bias)


def _is_row_exact(settings: Settings, device: torch.device) -> bool:
    """Return whether a row's bits do not depend on other rows of its step: on the CPU each is computed by itself."""
    is_exact = device.type == "cpu"
    if settings.deterministic and not is_exact:
        raise NotDeterministicError(f"deterministic: on {device} rows of a product depend on the rows beside them")
    return is_exact


def _max_model_len(checkpoint: Checkpoint, config: Any, settings: Settings) -> int:
    if settings.max_model_len != "auto":
        return settings.max_model_len
    limit = getattr(config.get_text_config(), "max_position_embeddings", LONGEST_AUTO)
    if not isinstance(limit, int) or limit < 1:
        raise CheckpointError(checkpoint.path / "config.json", f"its max_position_embeddings is {shown(limit)}")
    return min(limit, LONGEST_AUTO)


def _end_ids(checkpoint: Checkpoint) -> frozenset[int]:
    text_config = checkpoint.config.get("text_config")
    sources = [
        ("generation_config.json", checkpoint.generation_config),
        ("config.json", checkpoint.config),
        ("config.json", text_config if isinstance(text_config, dict) else {}),
    ]
    for file, source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(type(number) is not int for number in ids):  # JSON's true is an int to Python
                problem = f"its eos_token_id is {shown(value)}, and not a token id or a list of them"
                raise CheckpointError(checkpoint.path / file, problem)
            return frozenset(ids)
    return frozenset()
