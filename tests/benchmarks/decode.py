"""Decoding on the CPU against plain transformers, in one run: every expert resident, half of them, and with drafts.

The peers are transformers' own experts implementations, by `generate` and by a bare loop over the forward. Tokens must
be equal before anything is timed. Runs take turns, so that a slow phase of the machine hits all of them.

Run: python tests/benchmarks/decode.py [--model DIR] [--tokens N] [--rounds N]
"""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
from common import parse, publish
from transformers import AutoModelForCausalLM

import expertstream

PROMPT = 'def read_file(path, encoding="utf-8"):\n    """'
OURS: dict[str, dict[str, Any]] = {
    "resident": {"slots": "100%"},
    "half resident": {"slots": "50%"},
    "resident, 1 draft": {"slots": "100%", "speculate": 1},
}
PEERS = ("eager", "grouped_mm", "batched_mm")


def load_peer(model: str, experts: str) -> Any:
    """Load plain transformers in float32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation=experts)


def bare_loop(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Decode with nothing around the forward; return the tokens and seconds per token after the first."""
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True)
        name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
        cache = {name: getattr(out, name)}
        tokens = [int(out.logits[0, -1].argmax())]
        started = time.perf_counter()
        while len(tokens) < num_tokens:
            out = model(input_ids=torch.tensor([tokens[-1:]]), use_cache=True, **cache)
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens, (time.perf_counter() - started) / (num_tokens - 1)


def generate(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Decode with `generate`; prefill is taken off by timing a generation of one token."""
    ids = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    started = time.perf_counter()
    model.generate(ids, max_new_tokens=1, **options)
    first = time.perf_counter()
    out = model.generate(ids, max_new_tokens=num_tokens, **options)
    spent = (time.perf_counter() - first) - (first - started)
    return out[0, len(prompt) :].tolist(), spent / (num_tokens - 1)


async def ours(engine: expertstream.Engine, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Decode with an engine; return the tokens and seconds per token after the first."""
    tokens, started = [], 0.0
    async for token in engine.generate(prompt, max_tokens=num_tokens):
        tokens.append(token.id)
        if len(tokens) == 1:
            started = time.perf_counter()
    return tokens, (time.perf_counter() - started) / (num_tokens - 1)


async def run(model: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Take turns; return milliseconds per token (median, least) and ratios to the fastest peer."""
    engines = {}
    for name, settings in OURS.items():
        engines[name] = await expertstream.open(model, log_stream=io.StringIO(), stats_every=0, **settings)
    prompt = await engines["resident"].tokenize(PROMPT)
    peers = {name: load_peer(model, name) for name in PEERS}
    runs: dict[str, Callable[[], Awaitable[tuple[list[int], float]]]] = {}
    for name, engine in engines.items():
        runs["expertstream " + name] = partial(ours, engine, prompt, num_tokens)
    for name, peer in peers.items():
        runs[f"transformers {name}, bare loop"] = partial(_now, bare_loop, peer, prompt, num_tokens)
        runs[f"transformers {name}, generate"] = partial(_now, generate, peer, prompt, num_tokens)
    wanted = (await runs["transformers grouped_mm, bare loop"]())[0]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name, function in runs.items():
        if (await function())[0] != wanted:
            raise SystemExit(f"{name} gives other tokens: nothing is timed")
    for _ in range(rounds):
        for name, function in runs.items():
            seconds[name].append((await function())[1])
    for engine in engines.values():
        await engine.aclose()
    return _figures(seconds)


async def _now(function: Any, *arguments: Any) -> tuple[list[int], float]:
    result: tuple[list[int], float] = function(*arguments)
    return result


def _figures(seconds: dict[str, list[float]]) -> dict[str, Any]:
    table = {
        name: {"median_ms": round(statistics.median(values) * 1e3, 3), "least_ms": round(min(values) * 1e3, 3)}
        for name, values in seconds.items()
    }
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "per_token": table}
    for form in ("bare loop", "generate"):
        peers = {name: row for name, row in table.items() if name.endswith(form)}
        fastest = min(peers, key=lambda name: peers[name]["median_ms"])
        result[f"ratio to the fastest {form}"] = {
            "peer": fastest,
            **{
                name: round(peers[fastest]["median_ms"] / row["median_ms"], 3)
                for name, row in table.items()
                if name.startswith("expertstream")
            },
        }
    return result


def main() -> None:
    """Parse, run, publish."""
    given = parse(__doc__, model="tests/models/tiny-qwen3_5-moe", tokens=96, rounds=7)
    publish("decode", given, asyncio.run(run(given.model, given.tokens, given.rounds)))


if __name__ == "__main__":
    main()
