"""The life of streaming in a process: what is said when, and the one record at the end, seen from outside."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from children import Child, parse_line, run_script

from expertstream.steps.process import MAX_CLOSED_STORES, flush_statistics, register_store
from expertstream.steps.sink import LogSink
from expertstream.steps.statistics import Statistics

PRELUDE = """
import asyncio, os, signal, sys, threading
from expertstream.memory.outcome import Outcome
from expertstream.steps import process
from expertstream.steps.clock import StepClock
from expertstream.steps.sink import LogSink
from expertstream.steps.statistics import Counters, Statistics

sink = LogSink(log_file=sys.argv[1], host=False)

class Store:
    def __init__(self, sink=sink, every=16, min_s=0.0, now_ns=None):
        process.streaming_requested(sink, path="model")
        counters = Counters()
        self.clock = StepClock(on_end=counters.commit)
        extra = {"now_ns": now_ns} if now_ns else {}
        self.ledger = process.register_store(
            sink, snapshot=counters.snapshot, stats_every=every, stats_min_s=min_s, built={"slots": 8}, **extra)

    def run(self, steps):
        for _ in range(steps):
            with self.clock.step("paged") as step:
                step.add(Outcome(lookups=2, hits=2))
            self.ledger.step_ended()
        return self
"""

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
posix_signals = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")


def run(folder: Path, source: str, **options: Any) -> Child:
    return run_script(folder, PRELUDE + source, **options)


def final_of(child: Child) -> dict[str, Any]:
    """The one final record, which reconciles."""
    assert len(child.named("process.final")) == 1, child
    final = child.named("process.final")[0]
    parts = [Statistics.from_dict(store["statistics"]) for store in final["stores"]]
    totals = Statistics.from_dict(final["totals"])
    assert sum(parts, Statistics.zero()) == totals
    assert totals.violations() == []
    return final


# Each script, its exit code (None: the interpreter's own affair), and the steps of the one final record.
EXITS: dict[str, tuple[str, int | None, int]] = {
    "normal exit": ("Store().run(3)", 0, 3),
    "closed long before": ("Store().run(3).ledger.close()\nfor _ in range(9): sink.entry('later')", 0, 3),
    "zero steps": ("Store()", 0, 0),
    "periodic off": ("Store(every=0).run(40)", 0, 40),
    "unhandled exception": ("Store().run(3)\nraise ValueError", 1, 3),
    "sys.exit": ("Store().run(3)\nsys.exit(5)", 5, 3),
    "sys.exit in a task": (
        "async def main():\n    Store().run(2)\n    await asyncio.create_task(leave())\n"
        "async def leave():\n    sys.exit(4)\nasyncio.run(main())",
        4,
        2,
    ),
    "Ctrl-C": ("Store().run(3)\nsignal.raise_signal(signal.SIGINT)", None if sys.platform == "win32" else -2, 3),
    "first use in another thread": (
        "thread = threading.Thread(target=lambda: Store().run(2))\nthread.start()\nthread.join()",
        0,
        2,
    ),
    "daemon thread still there": (
        "Store().run(2)\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        0,
        2,
    ),
    "two stores": ("Store().run(3)\nStore().run(2).ledger.close()", 0, 5),
    "flush in a signal handler that SIGTERM has": (
        "Store().run(2)\nsignal.signal(signal.SIGTERM, lambda *_: process.flush_statistics('handler'))\n"
        "signal.raise_signal(signal.SIGTERM)",
        0,
        2,
    ),
    "stdout closed": ("os.close(1)\nStore(LogSink(log_file=sys.argv[1])).run(2)", None, 2),
    "stdout read by nobody": (
        "end, begin = os.pipe()\nos.dup2(begin, 1)\nos.close(end)\nStore(LogSink(log_file=sys.argv[1])).run(2)",
        None,
        2,
    ),
    "stderr closed": ("os.close(2)\nStore().run(2)", 0, 2),
    "failing snapshot": (
        "good = Store().run(2)\n"
        "def fail(): raise RuntimeError('gone')\n"
        "bad = Store().run(16)\nbad.ledger._snapshot = fail",
        0,
        18,
    ),
}


@pytest.mark.parametrize("name", EXITS)
def test_final_record_is_printed_exactly_once_at(tmp_path: Path, name: str) -> None:
    """Contract 4.4: exactly one final record, however the interpreter's exit is reached, with zero steps as well."""
    source, rc, steps = EXITS[name]
    child = run(tmp_path, source)
    final = final_of(child)
    assert (final["totals"]["steps"], final["reason"]) == (steps, None)
    assert child.entries[-1] in (final, *child.named("statistics.failed"))
    assert rc is None or child.rc == rc
    assert [entry["event"] for entry in child.entries][:2] == ["streaming.requested", "store.built"]
    assert len(child.named("streaming.requested")) == 1


NONE_AT = {
    "SIGKILL": "Store().run(3)\nos.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM without a handler": "Store().run(3)\nsignal.raise_signal(signal.SIGTERM)",
    "os._exit": "Store().run(3)\nos._exit(0)",
    "os.execv": "Store().run(3)\nos.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "not requested": "sink.entry('plan')\nprocess.not_built('never asked')\nprint(process.flush_statistics('me'))",
}


@posix_signals
@pytest.mark.parametrize("name", NONE_AT)
def test_no_final_record_is_printed_at(tmp_path: Path, name: str) -> None:
    """Contract 4.4: where the exit is not run, or streaming was never requested, nothing is printed."""
    child = run(tmp_path, NONE_AT[name])
    assert child.entries
    assert child.named("process.final") == []
    assert child.stdout == ("False\n" if name == "not requested" else "")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("process.streaming_requested(sink)", "open() did not finish"),
        ("process.streaming_requested(sink)\nprocess.not_built('a')\nprocess.not_built('not a MoE')", "not a MoE"),
        ("process.streaming_requested(sink)\nprocess.not_built('refused')\nStore()", None),
    ],
)
def test_request_without_a_store_is_recorded_with_its_reason(tmp_path: Path, source: str, reason: str | None) -> None:
    """Contract 4.4: requested and never built is printed too, with no stores and a reason."""
    final = final_of(run(tmp_path, source))
    assert (final["reason"], final["stores"] == []) == (reason, reason is not None)
    assert (final["totals"]["steps"], final["flushed_by"]) == (0, None)


def test_early_flush_takes_the_one_print_and_loses_nothing(tmp_path: Path) -> None:
    """Contract 4.4: flushing takes the one print, twice prints once, and store.closed has what came after."""
    child = run(
        tmp_path,
        "store = Store().run(3)\nprint(process.flush_statistics(by='me'), process.flush_statistics(by='you'))\n"
        "store.run(2).ledger.close()\nstore.ledger.close()",
    )
    final = final_of(child)
    assert (child.stdout, final["flushed_by"], final["totals"]["steps"]) == ("True False\n", "me", 3)
    closed = child.named("store.closed")[-1]
    assert (closed["statistics"]["steps"], len(child.named("store.closed"))) == (5, 1)
    assert Statistics.from_dict(closed["statistics"]).violations_since(Statistics.from_dict(final["totals"])) == []


def test_many_stores_are_folded_beyond_the_limit(tmp_path: Path) -> None:
    """Contract 4.4: beyond 64 closed stores the oldest are one entry, and totals are the sum over all."""
    child = run(tmp_path, "for count in range(100): Store(every=0).run(1 + count % 3).ledger.close()\nStore().run(7)")
    final = final_of(child)
    folded, *others = final["stores"]
    assert (folded["store"], folded["folded"], len(others)) == ("folded", 100 - MAX_CLOSED_STORES, 65)
    assert [store["store"] for store in others] == list(range(37, 102))
    assert final["totals"]["steps"] == sum(1 + count % 3 for count in range(100)) + 7
    assert [entry["store"] for entry in child.named("store.built")] == list(range(1, 102))


FORK = "store = Store().run(3)\npid = os.fork()\nif pid: os.waitpid(pid, 0)\n"


@needs_fork
@pytest.mark.parametrize(
    ("in_child", "steps"),
    [
        ("pass", [3]),
        ("store.run(20); store.ledger.close()", [3]),
        ("process.flush_statistics('child')", [3]),
        ("Store().run(2)", [2, 3]),
        ("process.streaming_requested(sink)", [0, 3]),
    ],
)
def test_forked_child_prints_only_a_record_of_its_own(tmp_path: Path, in_child: str, steps: list[int]) -> None:
    """Contract 4.4: a forked child never prints its parent's record; one that asks for streaming prints its own."""
    child = run(tmp_path, f"{FORK}else:\n    {in_child}\n")
    finals = child.named("process.final")
    assert sorted(final["totals"]["steps"] for final in finals) == steps
    assert len({final["pid"] for final in finals}) == len({final["run_id"] for final in finals}) == len(finals)
    serials = [store["store"] for final in finals for store in final["stores"]]
    assert len(set(serials)) == len(serials)
    assert child.named("store.closed") == []


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("is_parent", [True, False])
def test_child_of_multiprocessing_prints_its_own_record(tmp_path: Path, method: str, is_parent: bool) -> None:
    """Contract 4.4: children of multiprocessing run an exit of their own kind, and print once, as their parent does."""
    source = f"""
import multiprocessing
def work():
    Store().run(2)
if __name__ == "__main__":
    if {method!r} not in multiprocessing.get_all_start_methods():
        sys.exit(77)
    if {is_parent}:
        Store().run(3)
    child = multiprocessing.get_context({method!r}).Process(target=work)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
    child = run(tmp_path, source)
    if child.rc == 77:
        pytest.skip(f"no {method} here")
    assert (child.rc, child.stderr) == (0, "")
    finals = child.named("process.final")
    assert sorted(final["totals"]["steps"] for final in finals) == ([2, 3] if is_parent else [2])


def test_every_log_file_of_the_process_gets_the_final_record(tmp_path: Path) -> None:
    """Contract 4.4: one record per process, in each log that streaming was given, and once in the host's."""
    child = run(tmp_path, "Store(LogSink(log_file='other')).run(2)\nStore(LogSink(log_file=sys.argv[1])).run(1)")
    other = [parse_line(line) for line in (tmp_path / "other").read_text().splitlines()]
    finals = [entry for entry in other if entry["event"] == "process.final"] + child.named("process.final")
    assert [(final["totals"]["steps"], final["seq"]) for final in finals] == [(3, finals[0]["seq"])] * 2
    assert child.stdout.count("process.final") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_leaves_the_exit_code_and_is_said_on_stderr(tmp_path: Path) -> None:
    """Contract 4.2, 4.6: a log that cannot be written fails no step; the final record and the loss are on stderr."""
    child = run(tmp_path, "Store(LogSink(log_file='/dev/full', host=False)).run(32)\nsys.exit(3)")
    final = parse_line(child.stderr)
    assert (child.rc, final["event"], final["totals"]["steps"]) == (3, "process.final", 32)
    (lost,) = final["lost"]
    assert (lost["place"], lost["dropped"]) == ("/dev/full", 5)
    assert "No space left" in lost["error"]


@pytest.mark.parametrize(
    ("every", "min_s", "steps"),
    [(16, 0, [16, 32, 48]), (0, 0, []), (1, 0, list(range(1, 51))), (5, 10, [5, 15, 25, 35, 45]), (50, 1, [50])],
)
def test_periodic_record_keeps_its_rule(tmp_path: Path, every: int, min_s: float, steps: list[int]) -> None:
    """Contract 4.3: every N steps, 0 for never, and not sooner than the floor, on a clock of 1 s a step."""
    source = (
        f"import itertools\nclock = itertools.count(0, 10**9).__next__\nstore = Store(every={every}, min_s={min_s}, "
    )
    child = run(tmp_path, f"{source}now_ns=clock)\nstore.ledger.step_ended()\nstore.run(50)")
    periodic = child.named("statistics")
    assert [entry["statistics"]["steps"] for entry in periodic] == steps
    assert {entry["store"] for entry in periodic} <= {1}
    last = Statistics.from_dict(final_of(child)["totals"])
    for entry in periodic:
        assert last.violations_since(Statistics.from_dict(entry["statistics"])) == []
        assert list(entry["statistics"]) == list(last.as_dict())


def test_nothing_is_registered_before_the_first_request(tmp_path: Path) -> None:
    """Contract 5.5: importing starts and registers nothing, and the exit hook needs no torch."""
    source = (
        "before = 'multiprocessing.util' in sys.modules\nStore()\nprint(before, 'multiprocessing.util' in sys.modules,"
    )
    assert run(tmp_path, source + " 'torch' in sys.modules)").stdout == "False True False\n"


def test_level_does_not_hide_what_streaming_came_to(tmp_path: Path) -> None:
    """Contract 4.5: the shapes are readable at any level; only the periodic record is below it."""
    child = run(tmp_path, "Store(LogSink(log_file=sys.argv[1], host=False, level='error')).run(16).ledger.close()")
    assert [entry["event"] for entry in child.entries] == [
        "streaming.requested",
        "store.built",
        "store.closed",
        "process.final",
    ]


@pytest.mark.parametrize("arguments", [{"stats_every": -1}, {"stats_min_s": -0.5}, {"stats_min_s": float("nan")}])
def test_store_with_a_wrong_period_is_refused(arguments: dict[str, Any]) -> None:
    """A caller's mistake names the argument, the value and the bound, and says nothing on the log."""
    valid: dict[str, Any] = {"stats_every": 1, "stats_min_s": 0.0, "built": {}, "snapshot": Statistics.zero}
    with pytest.raises(ValueError, match=next(iter(arguments))):
        register_store(LogSink(host=False), **{**valid, **arguments})
    with pytest.raises(ValueError, match="by must name"):
        flush_statistics("")
