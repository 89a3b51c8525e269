"""The pure-miss stream of expert records through the store's own path, against bare copies of the same size.

Every look-up misses: as many records as slots are wanted each time, none of them resident. The bare copies go from the
same page-locked memory to the same slots. Needs a GPU.

Run: python tests/benchmarks/link.py [--record-mib M] [--records N] [--slots S]
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import parse, publish

from expertstream.kernels.cuda import CudaRuntime
from expertstream.memory.arena import HostArena
from expertstream.memory.arena_space import ArenaSpace
from expertstream.memory.reader import FileReader
from expertstream.memory.records import ExpertKey, RecordSource, pack
from expertstream.memory.store import ExpertStore

PASSES = 4
"""Times that every record is copied in a measurement. All of them together stay below one registered chunk of 1 GiB, so
that the bare copies need not be cut where chunks meet."""


def open_store(runtime: CudaRuntime, record_bytes: int, num_records: int, num_slots: int) -> ExpertStore:
    """Return a store over records that need no file: they have no pieces to read."""
    layout = pack({"up_proj": (record_bytes // 2,)}, torch.bfloat16)
    block = runtime.allocate_host(num_records * layout.num_bytes)
    block.fill_(1)
    pinning = runtime.start_registering(block)
    while not pinning.is_complete and pinning.failure is None:
        time.sleep(0.01)
    space = ArenaSpace(block, {layout.num_bytes: num_records})
    sources = {ExpertKey(0, expert): RecordSource(()) for expert in range(num_records)}
    arena = HostArena(space, {0: layout}, sources, FileReader(), num_threads=2)
    arena.start()
    return ExpertStore(runtime, arena, {0: layout}, {0: num_records}, {0: num_slots}, policy="lru")


def stream(store: ExpertStore, num_records: int, num_slots: int) -> tuple[float, int]:
    """Want every record once, slots' worth at a time; return seconds and bytes."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for first in list(range(0, num_records - num_slots + 1, num_slots)) * PASSES:
        for _ in store.serve(0, range(first, first + num_slots), None, overlap=True):
            pass
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return seconds, store.take_outcome().bytes


def bare(store: ExpertStore, num_records: int, num_slots: int) -> tuple[float, int]:
    """Copy the same records to the same slots with nothing around the copies."""
    stream_, copied = torch.cuda.Stream(), 0  # type: ignore[no-untyped-call]
    slots = store._layers[0].slots
    records = [store.arena._space.record(slots[0].numel(), place) for place in range(num_records)]
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.cuda.stream(stream_):
        for number, record in enumerate(records * PASSES):
            slots[number % num_slots].copy_(record, non_blocking=True)
            copied += record.numel()
    torch.cuda.synchronize()
    return time.perf_counter() - started, copied


def run(record_mib: float, num_records: int, num_slots: int) -> dict[str, Any]:
    """Take turns five times; return rates and their ratio."""
    runtime = CudaRuntime(0)
    store = open_store(runtime, int(record_mib * 2**20), num_records, num_slots)
    through, link = [], []
    for _ in range(6):
        seconds, count = stream(store, num_records, num_slots)
        through.append(count / seconds)
        seconds, count = bare(store, num_records, num_slots)
        link.append(count / seconds)
    figures = {"GB/s": sorted(through[1:])[2] / 1e9, "bare GB/s": sorted(link[1:])[2] / 1e9}
    figures["ratio"] = figures["GB/s"] / figures["bare GB/s"]
    pinned = runtime.is_pinned
    store.arena.close()
    runtime.close()
    return {
        "record_bytes": store._layers[0].layout.num_bytes,
        "pinned": pinned,
        "device": torch.cuda.get_device_name(),
        **{name: round(value, 4) for name, value in figures.items()},
    }


def main() -> None:
    """Parse, run, publish."""
    given = parse(__doc__, record_mib=9.0, records=112, slots=8)
    publish("link", given, run(given.record_mib, given.records, given.slots))


if __name__ == "__main__":
    main()
