"""What streaming costs on the CPU with records of 1 MiB and more: half of the slots against all of them.

A synthetic checkpoint (random bfloat16 weights, run in float32) is written to --folder if it is not there. Two engines
are open at once and take turns. Decode rows are fed fresh random tokens: a random model fed its own greedy tokens
collapses to a few and hits nearly always. Tokens of both are compared first. The slowdown per token is set against the
bytes that half the slots copied per token over the copy thread's own rate in the same run; residents compute while
copies run, so a part of the copying may be hidden, and what is left of it is the stall.

Run: python tests/benchmarks/streaming.py --folder DIR [--tokens N] [--rounds N]
"""

from __future__ import annotations

import asyncio
import functools
import io
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import parse, publish

import expertstream
from expertstream.memory.outcome import Outcome

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
    model.get_input_embeddings().weight.data.normal_(0, 8)  # about uniform routing
    model.save_pretrained(folder)


def decode(loaded: Any, num_tokens: int, seed: int) -> tuple[float, Any]:
    """Decode rows of fresh tokens; return seconds per token and the outcome of the residency."""
    rng = random.Random(seed)
    sequence = loaded.forwards.new_sequence()
    loaded.pool.reserve(sequence.table, num_tokens + 8)
    loaded.forwards.prefill(sequence, [rng.randrange(2048) for _ in range(8)])
    loaded.store.take_outcome()
    total = Outcome()
    started = time.perf_counter()
    for _ in range(num_tokens):
        _, rows = loaded.forwards.decode([(sequence, [rng.randrange(2048)])])
        rows.keep(sequence, 1)
        total += loaded.store.take_outcome()
    spent = time.perf_counter() - started
    loaded.pool.release(sequence.table)
    return spent / num_tokens, total


async def run(folder: Path, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Take turns; check that the tokens are equal; explain the difference."""
    if not (folder / "config.json").exists():
        write_model(folder)
    quiet: dict[str, Any] = {"dtype": "float32", "stats_every": 0}
    async with (
        expertstream.open(folder, slots="100%", log_stream=io.StringIO(), **quiet) as full,
        expertstream.open(folder, slots="50%", log_stream=io.StringIO(), **quiet) as half,
    ):
        engines = {"all resident": full, "half resident": half}
        tokens = [[t.id async for t in e.generate([5, 6, 7], max_tokens=num_tokens)] for e in engines.values()]
        if tokens[0] != tokens[1]:
            raise SystemExit("the tokens depend on residency: nothing is written down")
        rows: dict[str, list[Any]] = {name: [] for name in engines}
        for number in range(rounds + 2):
            for name, engine in engines.items():
                while not engine._opened.loaded.arena.is_complete:
                    await asyncio.sleep(0.05)
                loaded, thread = engine._opened.loaded, engine._opened.thread
                figures = await thread.submit(functools.partial(decode, loaded, num_tokens, number))
                if number >= 2:  # the first rounds fill the slots
                    rows[name].append(figures)
        record_bytes = full.facts["record_bytes"]
    return {"record_bytes": record_bytes, **_explain(rows, num_tokens)}


def _explain(rows: dict[str, list[Any]], num_tokens: int) -> dict[str, Any]:
    table: dict[str, dict[str, Any]] = {}
    for name, figures in rows.items():
        outcomes = [outcome for _, outcome in figures]
        count = len(figures) * num_tokens
        table[name] = {
            "ms_per_token": statistics.median(seconds for seconds, _ in figures) * 1e3,
            "bytes_per_token": sum(o.bytes for o in outcomes) / count,
            "copy_ms_per_token": sum(o.copy_ns for o in outcomes) / count / 1e6,
            "stall_ms_per_token": sum(o.stall_ns for o in outcomes) / count / 1e6,
            "hits_of_lookups": sum(o.hits for o in outcomes) / sum(o.lookups for o in outcomes),
        }
    half, full = table["half resident"], table["all resident"]
    slower = half["ms_per_token"] - full["ms_per_token"]
    result: dict[str, Any] = {name: {k: round(v, 4) for k, v in row.items()} for name, row in table.items()}
    result["copy_thread_bytes_per_s"] = round(half["bytes_per_token"] / half["copy_ms_per_token"] * 1e3)
    result["slower_ms_per_token"] = round(slower, 3)
    result["slower_over_copies"] = round(slower / half["copy_ms_per_token"], 3)
    result["slower_over_stall"] = round(slower / half["stall_ms_per_token"], 3)
    return result


def main() -> None:
    """Parse, run, publish."""
    given = parse(__doc__, folder="", tokens=48, rounds=8)
    if not given.folder:
        raise SystemExit("--folder says where the synthetic checkpoint is, or goes")
    publish("streaming", given, asyncio.run(run(Path(given.folder), given.tokens, given.rounds)))


if __name__ == "__main__":
    main()
