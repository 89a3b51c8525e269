"""How late a co-hosted task of the same event loop wakes up while the engine generates.

Run: python tests/benchmarks/heartbeat.py [--model DIR] [--seconds S] [--slots BUDGET]
"""

from __future__ import annotations

import asyncio
import io
import time
from typing import Any

import uvloop
from common import parse, publish

import expertstream

INTERVAL_S = 0.001


async def beat(seconds: float) -> list[float]:
    """Wake up every millisecond; return how late, in milliseconds."""
    late = []
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        await asyncio.sleep(INTERVAL_S)
        late.append((time.perf_counter() - now - INTERVAL_S) * 1e3)
    return late


def percentiles(late: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the largest."""
    ordered = sorted(late)
    pick = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * q))], 3) for name, q in pick.items()}


async def run(model: str, seconds: float, slots: str) -> dict[str, Any]:
    """Measure the heartbeat alone, then beside a generating engine."""
    alone = await beat(seconds)
    async with expertstream.open(model, slots=slots, log_stream=io.StringIO(), stats_every=0) as engine:
        await anext(aiter(engine.generate("x", max_tokens=1)))

        async def generate() -> None:
            while True:
                async for _ in engine.generate("import ", max_tokens=1000):
                    pass

        busy = asyncio.create_task(generate())
        before = engine.statistics().steps
        beside = await beat(seconds)
        steps = engine.statistics().steps - before
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
    return {"alone": percentiles(alone), "beside the engine": percentiles(beside), "steps": steps, "beats": len(beside)}


def main() -> None:
    """Parse, run on uvloop, publish."""
    given = parse(__doc__, model="tests/models/tiny-qwen3_5-moe", seconds=10.0, slots="50%")
    publish("heartbeat", given, uvloop.run(run(given.model, given.seconds, given.slots)))


if __name__ == "__main__":
    main()
