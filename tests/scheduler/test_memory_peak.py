"""Expert bytes exist once: the peak memory of opening a checkpoint of 1.5 GiB, measured in a child process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from children import run_script
from large import write_zeros

SCRIPT = """
import asyncio, json, sys, threading
import torch, transformers
from transformers import AutoModelForCausalLM, AutoConfig
import expertstream
import expertstream.scheduler.loading

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

peak, stop = [0], threading.Event()

def watch():
    while not stop.wait(0.002):
        peak[0] = max(peak[0], anonymous())

async def main():
    baseline = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    async with expertstream.open(sys.argv[2], dtype="bfloat16", slots="25%", log_file=sys.argv[1]) as engine:
        tokens = [token.id async for token in engine.generate([1, 2, 3], max_tokens=3)]
        while not engine._opened.loaded.arena.is_complete:
            await asyncio.sleep(0.01)
        facts = dict(engine.facts)
    stop.set()
    watcher.join()
    sizes = [int(facts[name]) for name in ("host_bytes", "device_bytes", "dense_bytes")]
    print(json.dumps({"tokens": len(tokens), "above": peak[0] - baseline, "sizes": sizes}))

asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see anonymous memory")
def test_peak_anonymous_memory_is_arena_slots_and_dense_weights(tmp_path: Path) -> None:
    """Opening takes at most arena + slots + non-expert weights + 300 MiB above what the imports take."""
    model = write_zeros(tmp_path / "model")
    (tmp_path / "run").mkdir()
    child = run_script(tmp_path / "run", SCRIPT, str(model), timeout_s=110)
    assert child.rc == 0, child.stderr
    seen = json.loads(next(line for line in child.stdout.splitlines() if line.startswith("{")))  # structlog prints too
    arena, slots, dense = seen["sizes"]
    assert arena == 4 * 64 * 3 * 1024 * 1024 * 2
    assert slots * 4 == arena
    assert seen["above"] > arena, "the measurement did not see the arena"
    assert seen["above"] <= arena + slots + dense + 300 * 2**20
