"""A synthetic checkpoint of a chosen size whose bytes are all zero: a sparse file, written in no time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

__all__ = ["write_zeros"]

_BASE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 256,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "eos_token_id": 511,
    "dtype": "bfloat16",
}


def write_zeros(folder: Path, **changes: Any) -> Path:
    """Write a Qwen3-MoE checkpoint in bfloat16, experts one by one, all weights zero; 1.5 GiB of experts by default."""
    config = {**_BASE, **changes}
    shapes = dict(_shapes(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _shapes(config: dict[str, Any]) -> Any:
    size, inner, heads = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * heads, config["num_key_value_heads"] * heads
    yield "model.embed_tokens.weight", (config["vocab_size"], size)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        for name, shape in (("q", (queries, size)), ("k", (keys, size)), ("v", (keys, size)), ("o", (size, queries))):
            yield f"{layer}self_attn.{name}_proj.weight", shape
        for name in ("q_norm", "k_norm"):
            yield f"{layer}self_attn.{name}.weight", (heads,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (size,)
        yield f"{layer}mlp.gate.weight", (config["num_experts"], size)
        for expert in range(config["num_experts"]):
            for name, shape in (("gate", (inner, size)), ("up", (inner, size)), ("down", (size, inner))):
                yield f"{layer}mlp.experts.{expert}.{name}_proj.weight", shape
    yield "model.norm.weight", (size,)
    yield "lm_head.weight", (config["vocab_size"], size)
