"""Decoding and prefill on a GPU with a cut Qwen3-30B-A3B shape and random weights, against plain transformers.

Tokens of every streamed setting must equal those of the resident one before anything is timed. Decode steps are fed
fresh random tokens: a random model fed its own greedy tokens collapses to a few and hits nearly always. Embeddings with
a deviation of 8 make routing about uniform. The link is measured in the same run, with copies of one record.

Run: python tests/benchmarks/gpu_decode.py --folder DIR [--layers N] [--steps N] [--threads N]
"""

from __future__ import annotations

import asyncio
import functools
import gc
import io
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import parse, publish
from safetensors.torch import save_file

import expertstream

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "dtype": "bfloat16",
}


def write_model(folder: Path, num_layers: int) -> None:
    """Write the checkpoint, a shard per layer; weights are drawn on the GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator("cuda").manual_seed(0)
    size, inner, experts = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"], SHAPE["num_experts"]

    def draw(*shape: int, std: float = 0.02) -> torch.Tensor:
        drawn = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator) * std
        return drawn.cpu()

    weight_map: dict[str, str] = {}

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))

    ones, heads = torch.ones(size, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    save(
        "outer.safetensors",
        {
            "model.embed_tokens.weight": draw(SHAPE["vocab_size"], size, std=8.0),
            "lm_head.weight": draw(SHAPE["vocab_size"], size),
            "model.norm.weight": ones,
        },
    )
    for number in range(num_layers):
        layer = f"model.layers.{number}."
        tensors = {
            layer + "self_attn.q_proj.weight": draw(4096, size),
            layer + "self_attn.k_proj.weight": draw(512, size),
            layer + "self_attn.v_proj.weight": draw(512, size),
            layer + "self_attn.o_proj.weight": draw(size, 4096),
            layer + "self_attn.q_norm.weight": heads.clone(),
            layer + "self_attn.k_norm.weight": heads.clone(),
            layer + "input_layernorm.weight": ones.clone(),
            layer + "post_attention_layernorm.weight": ones.clone(),
            layer + "mlp.gate.weight": draw(experts, size),
            layer + "mlp.experts.gate_up_proj": draw(experts, 2 * inner, size),
            layer + "mlp.experts.down_proj": draw(experts, size, inner),
        }
        save(f"layer-{number:03}.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": num_layers}), encoding="utf-8")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def link_rate(loaded: Any) -> float:
    """Copy 200 records one after another on the copy stream; return bytes per second."""
    runtime, store = loaded.runtime, loaded.store
    keys = [key for key in loaded.built.sources if key.layer == 0]
    _, errors = store.arena.require(keys)
    assert not errors
    slot = store._layers[0].slots[0]
    torch.cuda.synchronize()
    events = [runtime.copy(slot, store.arena.record(keys[n % len(keys)]), after=None) for n in range(200)]
    torch.cuda.synchronize()
    assert all(event.done() for event in events)
    store.arena.release(keys)
    return float(200 * slot.numel() / (sum(event.copy_ns for event in events) / 1e9))


def timed_steps(loaded: Any, num_steps: int) -> dict[str, Any]:
    """Run decode rows of fresh tokens on the step thread; return milliseconds and what was missed."""
    rng, forwards = random.Random(2), loaded.forwards
    sequence = forwards.new_sequence()
    loaded.pool.reserve(sequence.table, num_steps + 200)
    forwards.prefill(sequence, [rng.randrange(32_000) for _ in range(128)])
    times, bytes_, hits, lookups = [], 0, 0, 0
    for number in range(num_steps + 8):
        token = rng.randrange(32_000)
        torch.cuda.synchronize()
        started = time.perf_counter()
        result, rows = forwards.decode([(sequence, [token])])
        rows.keep(sequence, 1)
        int(result.logits[0].argmax())
        spent = time.perf_counter() - started
        outcome = loaded.store.take_outcome()
        if number >= 8:
            times.append(spent * 1e3)
            bytes_, hits, lookups = bytes_ + outcome.bytes, hits + outcome.hits, lookups + outcome.lookups
    loaded.pool.release(sequence.table)
    return {
        "ms": round(statistics.median(times), 3),
        "bytes_per_step": bytes_ / num_steps,
        "hits_of_lookups": round(hits / lookups, 4),
    }


def timed_prefill(loaded: Any, num_tokens: int, chunk: int) -> dict[str, Any]:
    """Prefill a fresh prompt in chunks; return seconds and the rate of the bytes that moved."""
    rng, forwards = random.Random(num_tokens), loaded.forwards
    prompt = [rng.randrange(32_000) for _ in range(num_tokens)]
    sequence = forwards.new_sequence()
    loaded.pool.reserve(sequence.table, num_tokens)
    loaded.store.take_outcome()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for start in range(0, num_tokens, chunk):
        result = forwards.prefill(sequence, prompt[start : start + chunk])
    int(result.logits[0].argmax())
    spent = time.perf_counter() - started
    moved = loaded.store.take_outcome().bytes
    loaded.pool.release(sequence.table)
    return {"seconds": round(spent, 4), "bytes": moved, "bytes_per_s": round(moved / spent)}


async def ours(folder: Path, slots: str, given: Any, prompt: list[int]) -> dict[str, Any]:
    """Open with a budget; return tokens and figures."""
    started = time.perf_counter()
    settings = {"device": "cuda", "slots": slots, "stats_every": 0, "reader_threads": given.threads}
    async with expertstream.open(folder, log_stream=io.StringIO(), max_model_len=8192, **settings) as engine:
        opened = time.perf_counter() - started
        loaded, thread = engine._opened.loaded, engine._opened.thread
        while not loaded.arena.is_complete:
            await asyncio.sleep(0.01)
        read = time.perf_counter() - started
        tokens = [token.id async for token in engine.generate(prompt, max_tokens=given.tokens)]
        while not loaded.runtime.is_pinned and time.perf_counter() - started < 60:
            await asyncio.sleep(0.01)
        figures = {
            "open_s": round(opened, 2),
            "read_s": round(read, 2),
            "pinned": loaded.runtime.is_pinned,
            "tokens": tokens,
            "link_bytes_per_s": round(await thread.submit(lambda: link_rate(loaded))),
            "decode": await thread.submit(lambda: timed_steps(loaded, given.steps)),
        }
        for count in (128, 4096):
            prefill = functools.partial(timed_prefill, loaded, count, 4096)
            await thread.submit(prefill)
            figures[f"prefill {count}"] = await thread.submit(prefill)
        return figures


def peer(folder: Path, experts: str, num_steps: int) -> float:
    """Decode with plain transformers, everything resident; return the median milliseconds of a step."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation=experts, device_map={"": 0}
    )
    rng, times = random.Random(2), []
    with torch.inference_mode():
        out = model(torch.tensor([[rng.randrange(32_000) for _ in range(128)]], device="cuda"), use_cache=True)
        name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
        cache = {name: getattr(out, name)}
        for _ in range(num_steps + 8):
            ids = torch.tensor([[rng.randrange(32_000)]], device="cuda")
            torch.cuda.synchronize()
            started = time.perf_counter()
            int(model(input_ids=ids, use_cache=True, **cache).logits[0, -1].argmax())
            times.append((time.perf_counter() - started) * 1e3)
    del model, cache, out
    gc.collect()
    torch.cuda.empty_cache()
    return round(statistics.median(times[8:]), 3)


async def run(given: Any) -> dict[str, Any]:
    """Measure every setting; refuse to publish when tokens differ."""
    folder = Path(given.folder)
    if not (folder / "config.json").exists():
        write_model(folder, given.layers)
    torch.cuda.empty_cache()
    prompt = [random.Random(7).randrange(32_000) for _ in range(64)]
    rows = {slots: await ours(folder, slots, given, prompt) for slots in ("100%", "75%", "50%", "25%")}
    tokens = rows["100%"]["tokens"]
    if any(row.pop("tokens") != tokens for row in rows.values()):
        raise SystemExit("tokens depend on residency: nothing is written down")
    for row in rows.values():
        floor = row["decode"]["bytes_per_step"] / row["link_bytes_per_s"] * 1e3
        row["decode"]["link_floor_ms"] = round(floor, 3)
    peers = {name: peer(folder, name, given.steps) for name in ("grouped_mm", "batched_mm")}
    return {
        "device": torch.cuda.get_device_name(),
        "layers": given.layers,
        "tokens_compared": len(tokens),
        "expertstream": rows,
        "transformers, all resident, ms per step": peers,
    }


def main() -> None:
    """Parse, run, publish."""
    given = parse(__doc__, folder="", layers=8, steps=40, tokens=64, threads=8)
    if not given.folder:
        raise SystemExit("--folder says where the synthetic checkpoint is, or goes")
    publish("gpu_decode", given, asyncio.run(run(given)))


if __name__ == "__main__":
    main()
