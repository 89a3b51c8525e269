"""The shipped checkpoint, and what plain transformers computes with it."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[1] / "models" / "tiny-qwen3_5-moe"
NUM_LAYERS, NUM_EXPERTS, TOP_K = 8, 32, 4
PROMPT = 'def read_file(path, encoding="utf-8"):\n    """'


def quiet(**settings: object) -> dict[str, Any]:
    """Return arguments for `expertstream.open` that keep log entries to themselves."""
    return {"log_stream": io.StringIO(), "stats_every": 0, **settings}


@functools.cache
def reference() -> Any:
    """Return the plain transformers model in float32, loaded once per test process."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, experts_implementation="grouped_mm", local_files_only=True
    )
    return model.eval()


@functools.cache
def tokenizer() -> Any:
    """Return the checkpoint's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@functools.cache
def greedy(prompt: str = PROMPT, num_tokens: int = 40) -> list[int]:
    """Return the greedy continuation by plain transformers."""
    import torch

    ids = tokenizer()(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = reference().generate(ids, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens
