"""What streaming costs with records of 1 MiB and more: half of the slots against all, explained by the bytes copied.

A synthetic checkpoint (random bfloat16 weights) is written to --folder if it is not there. The slowdown per token is
compared with the bytes that half the slots copied per token over the copy thread's own rate in the same run.

Run: python tests/benchmarks/streaming.py --folder DIR [--tokens N] [--rounds N]
"""

from __future__ import annotations

import asyncio
import io
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import parse, publish

import expertstream

SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 256,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "dtype": "bfloat16",
}


def write_model(folder: Path) -> None:
    """Write the synthetic checkpoint with transformers; records are 1.5 MiB in bfloat16 and 3 MiB in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **SHAPE)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


async def measure(model: Path, slots: str, num_tokens: int, rounds: int, dtype: str) -> dict[str, Any]:
    """Generate from fresh random prompts; return per-token seconds, bytes, copy and stall time, and the tokens."""
    rng = random.Random(1)
    per_token, tokens = [], []
    async with expertstream.open(model, slots=slots, dtype=dtype, log_stream=io.StringIO(), stats_every=0) as engine:
        while not engine._opened.loaded.arena.is_complete:
            await asyncio.sleep(0.05)
        totals: dict[str, int] = {"bytes": 0, "copy_ns": 0, "stall_ns": 0, "hits": 0, "lookups": 0}
        for number in range(rounds + 1):
            prompt = [rng.randrange(2048) for _ in range(8)]
            stream = engine.generate(prompt, max_tokens=num_tokens)
            tokens.append((await anext(stream)).id)
            before, started = engine.statistics(), time.perf_counter()
            tokens.extend([token.id async for token in stream])
            spent = time.perf_counter() - started
            if number:  # the first round warms up
                per_token.append(spent / (num_tokens - 1))
                done = engine.statistics() - before
                totals = {name: value + getattr(done, name) for name, value in totals.items()}
        record_bytes = engine.facts["record_bytes"]
    counted = rounds * (num_tokens - 1)
    return {
        "ms_per_token": round(statistics.median(per_token) * 1e3, 3),
        "mean_ms_per_token": round(statistics.mean(per_token) * 1e3, 3),
        "record_bytes": record_bytes,
        "bytes_per_token": totals["bytes"] / counted,
        "copy_ms_per_token": round(totals["copy_ns"] / counted / 1e6, 3),
        "stall_ms_per_token": round(totals["stall_ns"] / counted / 1e6, 3),
        "copy_bytes_per_s": totals["bytes"] / (totals["copy_ns"] / 1e9) if totals["copy_ns"] else None,
        "hits_of_lookups": round(totals["hits"] / totals["lookups"], 4),
        "tokens": tokens,
    }


async def run(folder: Path, num_tokens: int, rounds: int, dtype: str) -> dict[str, Any]:
    """Measure all and half, in turns; check that the tokens are equal; explain the difference."""
    if not (folder / "config.json").exists():
        write_model(folder)
    full = await measure(folder, "100%", num_tokens, rounds, dtype)
    half = await measure(folder, "50%", num_tokens, rounds, dtype)
    again = await measure(folder, "100%", num_tokens, rounds, dtype)
    if not full["tokens"] == half["tokens"] == again["tokens"]:
        raise SystemExit("the tokens depend on residency: nothing is written down")
    base = (full["mean_ms_per_token"] + again["mean_ms_per_token"]) / 2
    slower = half["mean_ms_per_token"] - base
    explained = half["bytes_per_token"] / half["copy_bytes_per_s"] * 1e3 if half["copy_bytes_per_s"] else 0.0
    for row in (full, half, again):
        del row["tokens"]
    return {
        "dtype": dtype,
        "all resident": full,
        "half resident": half,
        "all resident, again": again,
        "slower_ms_per_token": round(slower, 3),
        "explained_by_copies_ms_per_token": round(explained, 3),
        "ratio": round(slower / explained, 3) if explained else None,
    }


def main() -> None:
    """Parse, run, publish."""
    given = parse(__doc__, folder="", tokens=48, rounds=6, dtype="float32")
    if not given.folder:
        raise SystemExit("--folder says where the synthetic checkpoint is, or goes")
    publish("streaming", given, asyncio.run(run(Path(given.folder), given.tokens, given.rounds, given.dtype)))


if __name__ == "__main__":
    main()
