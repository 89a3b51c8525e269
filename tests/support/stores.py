"""A tiny expert store over record files written here, and a reader whose reads the test can hold up and fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from expertstream.kernels.scripted import ScriptedRuntime
from expertstream.memory.arena import HostArena
from expertstream.memory.arena_space import ArenaSpace
from expertstream.memory.errors import ReadError
from expertstream.memory.outcome import Outcome
from expertstream.memory.reader import FileReader
from expertstream.memory.records import ExpertKey, Piece, RecordLayout, RecordSource, pack
from expertstream.memory.store import ExpertStore

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from expertstream.kernels.runtime import Runtime

__all__ = [
    "SHAPES",
    "WAIT_S",
    "Records",
    "ScriptedReader",
    "TinyStore",
    "check_records",
    "keys",
    "open_arena",
    "open_store",
    "requiring",
    "wait_until_read_ahead",
    "wait_until_urgent",
    "write_records",
]

SHAPES = {"gate_up_proj": (6, 8), "down_proj": (8, 3)}
"""An expert's parts: 8 hidden features, 3 intermediate ones. In float32 both are padded to the record's alignment."""

WAIT_S = 20.0
"""Seconds after which a test that waits for a thread fails instead of hanging."""


@dataclass
class Records:
    """Record files and what they say: one file an expert, so that a file name tells whose read it is."""

    layouts: dict[int, RecordLayout]
    sources: dict[ExpertKey, RecordSource]
    expected: dict[ExpertKey, dict[str, torch.Tensor]]


def write_records(
    folder: Path,
    num_experts: Mapping[int, int],
    *,
    dtypes: Mapping[int, torch.dtype] | None = None,
    stored_dtype: torch.dtype | None = None,
    shapes: Mapping[str, Sequence[int]] = SHAPES,
) -> Records:
    """Writes the experts of some layers.

    Args:
        folder: where the files go.
        num_experts: MoE layer → experts.
        dtypes: MoE layer → dtype that runs; float32 where it is not named.
        stored_dtype: dtype of the files; None for the one that runs.
        shapes: the parts of an expert.
    """
    records = Records({}, {}, {})
    for layer, count in num_experts.items():
        dtype = (dtypes or {}).get(layer, torch.float32)
        stored = stored_dtype or dtype
        records.layouts[layer] = pack(shapes, dtype)
        for expert in range(count):
            generator = torch.Generator().manual_seed(1000 * layer + expert)
            parts = {name: torch.randn(*shape, generator=generator).to(stored) for name, shape in shapes.items()}
            file, offset, pieces = folder / f"{layer}-{expert}.bin", 0, []
            raw = b""
            for part in records.layouts[layer].parts:
                payload = parts[part.name].contiguous().view(torch.uint8).numpy().tobytes()
                pieces.append(Piece(file, offset, len(payload), stored, part.offset))
                raw, offset = raw + payload, offset + len(payload)
            file.write_bytes(raw)
            key = ExpertKey(layer, expert)
            records.sources[key] = RecordSource(tuple(pieces))
            records.expected[key] = {name: value.to(dtype) for name, value in parts.items()}
    return records


class ScriptedReader(FileReader):
    """Reads for real, when the test lets it, and fails for the experts the test names."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[ExpertKey] = []
        self.failing: set[ExpertKey] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.is_waiting = threading.Event()

    def read_into(self, file: Path, offset: int, buffer: WriteableBuffer) -> int:
        layer, expert = file.stem.split("-")
        key = ExpertKey(int(layer), int(expert))
        if not self.order or self.order[-1] != key:
            self.order.append(key)
        if not self.gate.is_set():
            self.is_waiting.set()
            assert self.gate.wait(WAIT_S), "the test never opened the gate"
        if key in self.failing:
            raise ReadError(file, offset, memoryview(buffer).nbytes, 0, "the test says so")
        return super().read_into(file, offset, buffer)


@contextmanager
def open_arena(
    records: Records,
    *,
    places: int | Mapping[int, int] | None = None,
    reader: FileReader | None = None,
    num_threads: int = 1,
    is_started: bool = True,
) -> Iterator[HostArena]:
    """Opens an arena over records and closes it.

    Args:
        records: from `write_records`.
        places: places per record size, or by record bytes; None for all experts.
        reader: None for a plain one.
        num_threads: reader threads.
        is_started: whether reading has begun.
    """
    counts: dict[int, int] = {}
    for key in records.sources:
        size = records.layouts[key.layer].num_bytes
        counts[size] = counts.get(size, 0) + 1
    if isinstance(places, int):
        counts = {size: min(count, places) for size, count in counts.items()}
    counts |= places if isinstance(places, Mapping) else {}
    block = torch.zeros(sum(size * count for size, count in counts.items()), dtype=torch.uint8)
    own = reader or FileReader()
    arena = HostArena(ArenaSpace(block, counts), records.layouts, records.sources, own, num_threads=num_threads)
    try:
        if is_started:
            arena.start()
        yield arena
    finally:
        arena.close()
        own.close()


def keys(*experts: int, layer: int = 0) -> list[ExpertKey]:
    """Names experts of one layer."""
    return [ExpertKey(layer, expert) for expert in experts]


def check_records(arena: HostArena, records: Records, wanted: Sequence[ExpertKey]) -> None:
    """Fails unless the arena holds exactly these experts' bytes."""
    for key in wanted:
        views = records.layouts[key.layer].views(arena.record(key), 1)
        for name, value in records.expected[key].items():
            assert torch.equal(views[name][0], value), f"the record of {key} holds something else"


def wait_until_read_ahead(arena: HostArena) -> None:
    """Waits until the background reading has ended."""
    with arena._changed:
        assert arena._changed.wait_for(lambda: not arena._background and not arena._reading, WAIT_S)


def wait_until_urgent(arena: HostArena, key: ExpertKey) -> None:
    """Waits until somebody waits for an expert that is not being read."""
    with arena._changed:
        assert arena._changed.wait_for(lambda: key in arena._urgent, WAIT_S)


@contextmanager
def requiring(
    arena: HostArena, wanted: Sequence[ExpertKey]
) -> Iterator[list[tuple[Outcome, dict[ExpertKey, BaseException]]]]:
    """Requires keys on a thread of its own, and joins it at the end."""
    results: list[tuple[Outcome, dict[ExpertKey, BaseException]]] = []
    thread = threading.Thread(target=lambda: results.append(arena.require(wanted)), daemon=True)
    thread.start()
    yield results
    thread.join(WAIT_S)
    assert not thread.is_alive(), "require did not return"


@dataclass
class TinyStore:
    """A store, what is under it, and what its experts ought to be."""

    store: ExpertStore
    arena: HostArena
    records: Records
    total: Outcome = field(default_factory=Outcome)

    def check(self, layer: int, expert: int, slot: int) -> None:
        """Fails unless the slot holds exactly this expert."""
        for name, expected in self.records.expected[ExpertKey(layer, expert)].items():
            assert torch.equal(self.store.parts(layer)[name][slot], expected), f"slot {slot} is not expert {expert}"

    def serve(
        self, experts: Sequence[int], *, layer: int = 0, recent: Sequence[int] | None = None, overlap: bool = False
    ) -> list[tuple[int, ...]]:
        """Serves experts, checks every slot that is lent, and returns the batches. The outcome goes to `last`."""
        batches = []
        try:
            for leases in self.store.serve(layer, experts, recent, overlap=overlap):
                for lease in leases:
                    assert self.store.table(layer).is_held(lease.expert), f"expert {lease.expert} is lent and not held"
                    self.check(layer, lease.expert, lease.slot)
                batches.append(tuple(lease.expert for lease in leases))
        finally:
            self.last = self.store.take_outcome()
            self.total = self.total + self.last
            self.store.table(layer).check_integrity()
            check_sums(self.total)
        return batches

    def residents(self, layer: int = 0) -> set[int]:
        """Experts whose bytes are in a slot; each slot is checked."""
        table = self.store.table(layer)
        found = set(table.policy.victims())
        for expert in found:
            slot = table.slot_of(expert)
            assert slot is not None
            self.check(layer, expert, slot)
        return found

    last: Outcome = field(default_factory=Outcome)


def check_sums(outcome: Outcome) -> None:
    """Fails unless the counters reconcile (contract 3.3)."""
    assert outcome.lookups == outcome.hits + outcome.joins + outcome.misses + outcome.forced
    assert outcome.misses == outcome.fills + outcome.fills_failed + outcome.exhausted
    assert outcome.evictions <= outcome.fills + outcome.prefetch_issued


@contextmanager
def open_store(
    folder: Path,
    *,
    num_experts: int = 8,
    num_slots: int = 4,
    num_layers: int = 1,
    policy: str = "lru",
    runtime: Runtime | None = None,
    places: int | None = None,
    reader: FileReader | None = None,
    dtypes: Mapping[int, torch.dtype] | None = None,
) -> Iterator[TinyStore]:
    """Opens a store of like layers, on a scripted runtime unless told otherwise, and closes all of it."""
    records = write_records(folder, dict.fromkeys(range(num_layers), num_experts), dtypes=dtypes)
    own = runtime or ScriptedRuntime()
    with open_arena(records, places=places, reader=reader) as arena:
        try:
            layers = range(num_layers)
            experts, slots = dict.fromkeys(layers, num_experts), dict.fromkeys(layers, num_slots)
            yield TinyStore(ExpertStore(own, arena, records.layouts, experts, slots, policy=policy), arena, records)
        finally:
            own.close()
