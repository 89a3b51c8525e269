"""The plain transformers model, every expert in memory: what parity is measured against."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

__all__ = ["ReferenceRun", "run_reference"]


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """What the plain model computes for one sequence.

    Attributes:
        logits: [tokens, vocabulary].
        layer_inputs: Per decoder layer, hidden states [tokens, hidden] that go in.
        layer_outputs: Per decoder layer, hidden states [tokens, hidden] that come out.
    """

    logits: torch.Tensor
    layer_inputs: tuple[torch.Tensor, ...]
    layer_outputs: tuple[torch.Tensor, ...]


@torch.inference_mode()
def run_reference(
    path: str | os.PathLike[str], token_ids: Sequence[int], dtype: torch.dtype, device: torch.device
) -> ReferenceRun:
    """Load the whole model with transformers' grouped experts and run one forward without a cache. Blocking.

    Args:
        path: The checkpoint's folder.
        token_ids: The sequence.
        dtype: The dtype that runs.
        device: Where it runs.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, experts_implementation="grouped_mm", trust_remote_code=False, local_files_only=True
    )
    model.eval().to(device)
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"])[0])

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        outputs.append((output[0] if isinstance(output, tuple) else output)[0])

    for layer in model.get_decoder().layers:
        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after)
    out = model(input_ids=torch.tensor([list(token_ids)], device=device), use_cache=False)
    return ReferenceRun(out.logits[0], tuple(inputs), tuple(outputs))
