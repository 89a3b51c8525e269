"""Logs to read: those of a real process with a step clock and two stores, and of one whose log is split in two."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from children import read_entries, run_script

from expertstream.scheduler.report.reading import Report, read_logs

Entry = dict[str, Any]
Check = Callable[..., Report]

_PROCESS = """
import sys
from pathlib import Path
from expertstream.memory.outcome import Outcome
from expertstream.steps import process
from expertstream.steps.clock import StepClock
from expertstream.steps.sink import LogSink
from expertstream.steps.statistics import Counters

BYTES = 64

class Store:
    def __init__(self, sink, every=4):
        process.streaming_requested(sink, model="model")
        counters = Counters()
        self.clock = StepClock(on_end=counters.commit)
        built = {
            "model": "small", "dtype": "float32", "device": "cpu", "slots": 8, "experts": 16, "policy": "lru",
            "record_bytes": [BYTES], "versions": {"torch": "none"},
            "settings": {"stats_every": {"value": str(every), "source": "argument"}},
        }
        self.ledger = process.register_store(
            sink, snapshot=counters.snapshot, stats_every=every, stats_min_s=0, built=built)

    def run(self, steps, kind="paged"):
        for _ in range(steps):
            with self.clock.step(kind) as step:
                step.count_tokens(decode=1, drafted=1)
                step.add(Outcome(lookups=4, hits=1, joins=1, misses=2, fills=2, evictions=1, bytes=2 * BYTES,
                                 prefetch_issued=2, prefetch_late=1, prefetch_used=1, bytes_prefetch=2 * BYTES))
            self.ledger.step_ended()

log = Path(sys.argv[1])
"""

_TWO_STORES = """
sink = LogSink(log_file=log, host=False)
one, two = Store(sink), Store(sink)
one.run(8)
sink.entry("warning", "warning", code="slots.below_working_set", message="more slots")
two.run(5, "draft")
two.ledger.close()
one.run(6)
"""

_SPLIT = """
first, second = LogSink(log_file=log, host=False), LogSink(log_file=log.with_name("second.jsonl"), host=False)
one, two = Store(first), Store(second)
for _ in range(2):
    one.run(4)
    two.run(4)
two.ledger.close()
"""


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """Entries of a process with two stores; line N is index N - 1.

    1 streaming.requested, 2 store.built 1, 3 store.built 2, 4 and 5 statistics of 1 (4 and 8 steps), 6 warning,
    7 statistics of 2 (4 steps), 8 store.closed 2 (5 steps), 9 statistics of 1 (12 steps), 10 process.final.
    """
    child = run_script(tmp_path_factory.mktemp("good"), _PROCESS + _TWO_STORES)
    assert child.rc == 0, child.stderr
    names = " ".join(entry["event"].rpartition(".")[2] for entry in child.entries)
    assert names == "requested built built statistics statistics warning statistics closed statistics final"
    return child.entries


@pytest.fixture(scope="session")
def split(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Entry], list[Entry]]:
    """Entries of a process with a log for each of its two stores, which share one sequence."""
    folder = tmp_path_factory.mktemp("split")
    child = run_script(folder, _PROCESS + _SPLIT)
    assert child.rc == 0, child.stderr
    return child.entries, read_entries(folder / "second.jsonl")


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Writes logs, each given as entries, lines or bytes, to `0.jsonl`, `1.jsonl`, … and reads them."""

    def read(*logs: Sequence[Entry | str] | bytes) -> Report:
        names = []
        for number, log in enumerate(logs):
            path = tmp_path / f"{number}.jsonl"
            path.write_bytes(log if isinstance(log, bytes) else as_bytes(log))
            names.append(str(path))
        return read_logs(names)

    return read


def as_bytes(lines: Sequence[Entry | str]) -> bytes:
    """Returns a log of entries, and of lines that are text already."""
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
