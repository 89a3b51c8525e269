"""Log entries: the envelope, where they go, and that no failure of a place reaches the caller."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import unicodedata
from collections.abc import Iterator, MutableMapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from children import parse_line, read_entries, run_script

from expertstream.steps.sink import SCHEMA, LogSink, bound_context, context_bound, write_final

ENVELOPE = ["schema", "event", "ts", "mono_ns", "seq", "run_id", "pid", "level"]


class Switch(io.StringIO):
    """A stream that can be told to fail."""

    error: Exception | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)

    def entries(self) -> list[dict[str, Any]]:
        return [parse_line(line) for line in self.getvalue().splitlines()]


@pytest.fixture
def host() -> Iterator[list[MutableMapping[str, Any]]]:
    with structlog.testing.capture_logs() as entries:
        yield entries


def only_stream() -> tuple[LogSink, Switch]:
    stream = Switch()
    return LogSink(host=False, stream=stream), stream


def test_entry_has_its_envelope_then_context_then_fields() -> None:
    """Contract 4.1: every entry has schema, event, ts, mono_ns, seq, run_id, pid and level, in front of the rest."""
    sink, stream = only_stream()
    with context_bound({"request_id": "r1"}):
        sink.entry("store.built", "warning", slots=8)
    (entry,) = stream.entries()
    assert list(entry) == [*ENVELOPE, "request_id", "slots"]
    assert (entry["schema"], entry["event"], entry["level"]) == (SCHEMA, "store.built", "warning")
    assert (entry["pid"], entry["request_id"], entry["slots"]) == (os.getpid(), "r1", 8)
    assert datetime.fromisoformat(entry["ts"]).utcoffset() == timedelta(0)
    assert len(entry["run_id"]) == 32


def test_seq_has_no_gap_over_threads_and_sinks_of_a_process() -> None:
    """Contract 4.1: seq is for gap detection: each entry of the process draws the next number, once."""
    sinks = [only_stream(), only_stream()]

    def run(sink: LogSink) -> None:
        for _ in range(200):
            sink.entry("line")

    threads = [threading.Thread(target=run, args=(sink,)) for sink, _ in sinks * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = [entry for _, stream in sinks for entry in stream.entries()]
    numbers = sorted(entry["seq"] for entry in entries)
    assert numbers == list(range(numbers[0], numbers[0] + 800))
    assert len({entry["run_id"] for entry in entries}) == 1


def test_entry_below_the_level_is_not_made(host: list[MutableMapping[str, Any]]) -> None:
    """The level holds for every target and leaves no gap in seq; what streaming came to is recorded whatever it is."""
    stream = Switch()
    sink = LogSink(stream=stream, level="warning")
    sink.entry("a", "warning")
    sink.entry("b", "info")
    sink.record("c", "info")
    shown = stream.entries()
    assert [entry["event"] for entry in shown] == ["a", "c"]
    assert shown[1]["seq"] == shown[0]["seq"] + 1
    assert [entry["event"] for entry in host] == ["a", "c"]


def test_field_named_like_the_envelope_gets_an_underscore() -> None:
    """A parser can rely on the envelope: a field or a bound name of the same name does not replace it."""
    sink, stream = only_stream()
    with context_bound({"run_id": "mine"}):
        sink.entry("e", "info", pid=1, level="loud", event="x", dropped=3)
    (entry,) = stream.entries()
    assert (entry["pid"], entry["level"], entry["event"]) == (os.getpid(), "info", "e")
    assert (entry["pid_"], entry["level_"], entry["event_"], entry["run_id_"]) == (1, "loud", "x", "mine")
    assert (entry["dropped_"], "dropped" in entry) == (3, False)


def test_values_are_rendered_as_json(host: list[MutableMapping[str, Any]]) -> None:
    """Contract 4.6: values are JSON wherever the entry goes."""
    stream = Switch()
    LogSink(stream=stream).entry("é\u2028", rate=float("nan"), path=Path("x"), **{"odd \udc80": {(1, 2): b"z"}})
    assert stream.getvalue().isascii()
    for entry in (stream.entries()[0], host[0]):
        assert (entry["rate"], entry["path"], entry["odd \\udc80"]) == (None, "x", {"1,2": "z"})


def test_entry_goes_to_the_host_as_it_configured_structlog(host: list[MutableMapping[str, Any]]) -> None:
    """Contract 4.2: embedded, entries go to the host's structlog, with envelope, and nothing is configured for it."""
    LogSink().entry("statistics", "warning", steps=3)
    assert (host[0]["event"], host[0]["log_level"], host[0]["steps"]) == ("statistics", "warning", 3)
    assert set(ENVELOPE) <= set(host[0])
    assert LogSink(host=False).target_keys == frozenset()


def test_making_a_sink_configures_nothing(tmp_path: Path) -> None:
    """Contract 4.2: structlog and logging stay as the host has them, and no file is opened before an entry."""
    child = run_script(
        tmp_path,
        "import logging, structlog, sys\nfrom expertstream.steps.sink import LogSink\n"
        "sink = LogSink(log_file=sys.argv[1], host=False)\nimport os\nprint(os.path.exists(sys.argv[1]))\n"
        "sink.entry('e')\nprint(structlog.is_configured(), logging.root.handlers, 'torch' in sys.modules)",
    )
    assert child.stdout.split("\n")[:2] == ["False", "False [] False"]


@pytest.mark.anyio
async def test_context_of_a_request_reaches_other_threads_and_stays_apart() -> None:
    """Contract 4.6: ids bound by the caller reach entries logged from other threads and tasks, and never mix."""
    sink, stream = only_stream()

    async def request(number: int) -> None:
        with context_bound({"request_id": number}):
            await asyncio.to_thread(sink.entry, "thread", "info", mine=number)
            await asyncio.create_task(task(number))

    async def task(number: int) -> None:
        sink.entry("task", mine=number, bound=bound_context())

    await asyncio.gather(request(1), request(2))
    sink.entry("after")
    *entries, after = stream.entries()
    assert len(entries) == 4
    assert all(entry["request_id"] == entry["mine"] for entry in entries)
    assert [entry["bound"] for entry in entries if entry["event"] == "task"] == [{"request_id": 1}, {"request_id": 2}]
    assert "request_id" not in after


@pytest.mark.parametrize("error", [BrokenPipeError(), BlockingIOError(), ValueError("closed"), OSError(28, "full")])
def test_failing_target_is_counted_and_shown_by_the_next_entry(error: Exception) -> None:
    """Contract 4.6: a sink that fails raises nothing; what was dropped is counted and shown later."""
    sink, stream = only_stream()
    stream.error = error
    sink.entry("a")
    sink.entry("b")
    stream.error = None
    sink.entry("c")
    sink.entry("d")
    shown = stream.entries()
    assert [(entry["event"], entry.get("dropped")) for entry in shown] == [("c", 2), ("d", None)]
    assert shown[0]["dropped_targets"] == ["stream"]
    assert (sink.dropped, repr(sink)) == (2, "<LogSink to stream: 2 dropped>")


def test_loss_of_one_target_is_shown_by_the_others_too(tmp_path: Path, host: list[MutableMapping[str, Any]]) -> None:
    """Contract 4.6: where the file is lost for good, the host's log is what shows it."""
    log = tmp_path / "missing" / "log"
    sink = LogSink(log_file=log)
    sink.entry("a")
    sink.entry("b")
    assert [(entry.get("dropped"), entry.get("dropped_targets")) for entry in host] == [(None, None), (1, ["file"])]
    log.parent.mkdir()
    sink.entry("c")
    assert [(entry["event"], entry["dropped"]) for entry in read_entries(log)] == [("c", 2)]


def test_failing_host_costs_only_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor of the host that raises reaches neither the caller nor the library's own file."""

    def fail(*_: object) -> object:
        raise RuntimeError("processor")

    log = tmp_path / "log"
    sink = LogSink(log_file=log)
    with monkeypatch.context() as patch:
        patch.setattr(structlog, "get_logger", fail)
        sink.entry("a", broken=object())
    assert [(entry["event"], entry["dropped_targets"]) for entry in read_entries(log)] == [("a", ["host"])]


def test_console_shows_the_same_fields_on_one_line() -> None:
    """Contract 4.1: a console renderer shows the same fields, and no value can forge a line or move the cursor."""
    stream = io.StringIO()
    sink = LogSink(host=False, stream=stream, log_format="console")
    sink.entry("store.built\n\x9b", text="a\n\x1b[2J\u2028b\x85", nested={"hits": 1}, slots=8)
    (line,) = stream.getvalue().split("\n")[:-1]
    assert len(line.splitlines()) == 1
    assert all(unicodedata.category(char) not in ("Cc", "Zl", "Zp") for char in line)
    assert r"store.built\x0a\x9b" in line
    assert r"\x1b[2J\u2028b\x85" in line
    assert '{"hits": 1}' in line
    for name in ("schema=", "mono_ns=", "seq=", "run_id=", "pid=", "slots=8", "info", "store.built"):
        assert name in line


def test_final_goes_to_each_distinct_target_once(tmp_path: Path, host: list[MutableMapping[str, Any]]) -> None:
    """Contract 4.4: one record per process: sinks that share a target share its line, with one seq everywhere."""
    logs = [tmp_path / "a", tmp_path / "b"]
    sinks = [LogSink(log_file=log) for log in (*logs, logs[0])]
    write_final(sinks, "process.final", totals={})
    found = [*read_entries(logs[0]), *read_entries(logs[1]), *host]
    assert [entry["event"] for entry in found] == ["process.final"] * 3
    assert len({entry["seq"] for entry in found}) == 1


@pytest.mark.parametrize("has_target", [True, False])
def test_final_falls_back_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str], has_target: bool) -> None:
    """Contract 4.2: a sink that fails falls back to stderr for the final record, and the loss is said there."""
    log = tmp_path / "missing" / "log"
    sink = LogSink(log_file=log if has_target else None, host=False)
    sink.entry("a")
    assert capsys.readouterr().err == ""
    sink.final("process.final", totals={"steps": 1})
    entry = parse_line(capsys.readouterr().err)
    assert (entry["event"], entry["totals"]) == ("process.final", {"steps": 1})
    places = [(lost["target"], lost["place"], lost["dropped"]) for lost in entry["lost"]]
    assert places == ([("file", str(log), 2)] if has_target else [])
    assert all("FileNotFoundError" in lost["error"] for lost in entry["lost"])


def test_final_with_stderr_gone_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last resort may be gone as well: that ends the record, not the process."""
    broken = Switch()
    broken.error = BrokenPipeError()
    monkeypatch.setattr("sys.stderr", broken)
    monkeypatch.setattr("sys.__stderr__", None)
    LogSink(log_file=tmp_path / "missing" / "log", host=False).final("process.final")
    assert broken.getvalue() == ""


PIPE = """
import os, sys
from expertstream.steps.sink import LogSink
end, begin = os.pipe()
os.dup2(begin, 2)
os.close(begin)
os.close(end)
sink = LogSink(log_file=sys.argv[1], host=False, stream=sys.stderr)
sink.entry("a")
sink.final("b")
"""


def test_broken_pipe_leaves_the_exit_code(tmp_path: Path) -> None:
    """Contract 4.6: the reader of a log may go away; steps, the other targets and the exit code are as before."""
    child = run_script(tmp_path, PIPE)
    assert (child.rc, [entry["event"] for entry in child.entries]) == (0, ["a", "b"])
    assert child.entries[1]["dropped_targets"] == ["stream"]


FORK = """
import os, sys
from expertstream.steps.sink import LogSink
sink = LogSink(log_file=sys.argv[1], host=False)
sink.entry("before")
lock = sink._losses.get().lock, sink._log_file._lock.get()
for each in lock:
    each.acquire()
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
    for each in lock:
        each.release()
sink.entry("after")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_has_its_own_identity_and_locks(tmp_path: Path) -> None:
    """A forked child logs under its own run_id, pid and seq, also when a lock was held as it was forked off."""
    child = run_script(tmp_path, FORK, timeout_s=20)
    before, forked, after = child.entries
    assert (before["run_id"], before["pid"], after["seq"]) == (after["run_id"], after["pid"], 2)
    assert forked["seq"] == 1
    assert forked["run_id"] != before["run_id"]
    assert forked["pid"] != before["pid"]


@pytest.mark.parametrize("arguments", [{"level": "loud"}, {"log_format": "xml"}])
def test_unknown_setting_of_a_sink_is_refused(arguments: dict[str, Any]) -> None:
    """A wrong level or format is an error that shows the accepted ones."""
    with pytest.raises(ValueError, match="must be"):
        LogSink(**arguments)
