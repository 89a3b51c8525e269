"""Tiny random checkpoints of several Mixture-of-Experts families, written by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "mixtral": {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24},
    "olmoe": {"intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "qwen3_next": {
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}


def write_family(name: str, folder: Path, **changes: Any) -> Path:
    """Write a checkpoint of a family with seeded random weights; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**_COMMON, **FAMILIES[name], "initializer_range": 0.3, **changes})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, max_shard_size="300KB")
    return folder
