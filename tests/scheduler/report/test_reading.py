"""Logs in any state are read: what is good in them counts, and what is not is located."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertstream.scheduler.report.lines import MAX_LINE_BYTES
from expertstream.scheduler.report.reading import Report, read_logs
from expertstream.scheduler.report.summary import as_values

Entries = list[Any]
Check = Callable[..., Report]


def text(entries: Entries) -> bytes:
    """A log of entries."""
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def test_reading_cut_last_line_is_noted_and_no_violation(check: Check, good: Entries) -> None:
    """A process that was killed while it wrote leaves half a line: that, and no final record after it, is normal."""
    whole = text(good)
    begin = whole.rindex(b"\n", 0, -1) + 1
    for end in (begin + 1, begin + 40, begin + 150, len(whole) - 2):
        report = check(whole[:end])
        assert report.findings.kept == []
        (log,) = report.logs
        assert (log.num_entries, log.num_damaged) == (9, 0)
        assert log.cut is not None
        assert log.cut[0] == 10
        (run,) = as_values(report, is_checked=True)["runs"]
        assert (run["shape"], "ends in a cut line" in run["meaning"]) == ("no_exit_built", True)


def test_reading_cut_line_of_another_run_excuses_nothing(check: Check, good: Entries) -> None:
    """A cut line that names another run says nothing about why this one has no final record."""
    cut = json.dumps(good[-1] | {"run_id": "another"})[:300].encode()
    assert [each.rule for each in check(text(good[:-1]) + cut).findings.kept] == ["final.count"]


def test_reading_last_line_without_newline_that_is_whole_counts(check: Check, good: Entries) -> None:
    """Only the newline is missing: the entry is there."""
    report = check(text(good)[:-1])
    assert (report.findings.kept, report.logs[0].num_entries, report.logs[0].cut) == ([], 10, None)


HARMLESS: dict[str, Callable[[bytes], bytes]] = {
    "BOM": lambda log: b"\xef\xbb\xbf" + log,
    "CRLF": lambda log: log.replace(b"\n", b"\r\n"),
    "gzip": gzip.compress,
    "gzip in two members": lambda log: gzip.compress(log[:900]) + gzip.compress(log[900:]),
    "blank lines": lambda log: log.replace(b"\n", b"\n\n"),
    "lines of others": lambda log: log.replace(b"\n", b'\n{"event": "other", "seq": 1}\n'),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_reading_harmless_form_changes_nothing(check: Check, good: Entries, name: str) -> None:
    """A byte order mark, Windows line ends, gzip, blank lines and a host's own JSON lines are no damage."""
    report = check(HARMLESS[name](text(good)))
    assert (report.findings.kept, report.logs[0].num_entries, report.logs[0].num_damaged) == ([], 10, 0)


DAMAGED = {
    "NUL bytes": (b"\0" * 4096, "holds NUL bytes"),
    "NUL bytes before an entry": (b'\0\0{"a": 1}', "holds NUL bytes"),
    "UTF-16": ('{"a": "é"}'.encode("utf-16"), "holds NUL bytes"),
    "invalid UTF-8": (b'{"a": "\xff"}', "not UTF-8"),
    "plain text": (b"Traceback (most recent call last):", "not JSON"),
    "two objects": (b'{"a": 1}{"b": 2}', "not JSON"),
    "a number": (b"17", "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "text": (b'"text"', "not a JSON object"),
    "deep nesting": (b"[" * 200_000, "not JSON"),
    "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    "a control character": (b'{"a": "\x01"}', "not JSON"),
    "a huge line": (b'{"a": "' + b"x" * MAX_LINE_BYTES + b'"}', f"longer than {MAX_LINE_BYTES} bytes"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_reading_damage_in_the_middle_is_skipped_counted_and_located(check: Check, good: Entries, name: str) -> None:
    """A damaged line costs itself: totals are those of the good lines, and the range is told with its reason."""
    line, reason = DAMAGED[name]
    report = check(text(good[:5]) + line + b"\n" + line + b"\n" + text(good[5:]))
    (log,) = report.logs
    assert (log.num_entries, log.num_damaged, log.damaged) == (10, 2, [(6, 7, reason)])
    assert [(each.place.line, each.rule) for each in report.findings.kept] == [(6, "damage")]
    (run,) = as_values(report, is_checked=True)["runs"]
    assert run["totals"]["steps"] == 19


def names_only_the_first_log(report: Report) -> bool:
    """Whether there is no run, and the one violation is that nothing is from this library, in the first log."""
    (violation,) = report.findings.kept
    place = (violation.place.file, violation.place.line)
    return not report.runs and violation.rule == "empty" and place == (report.logs[0].name, 0)


def test_reading_empty_files_are_a_violation_of_the_first(check: Check) -> None:
    """No line is no run: probably the wrong files, which must not pass for logs without a fault."""
    assert names_only_the_first_log(check(b"", b"\n", gzip.compress(b"")))


def test_reading_logs_of_others_only_are_a_violation_of_the_first(check: Check, good: Entries) -> None:
    """JSON lines of others alone are the wrong file; beside one log of this library they are no fault."""
    others = b'{"event": "other", "seq": 1}\n{"message": "started"}\n'
    assert names_only_the_first_log(check(others, others))
    assert check(others, text(good)).findings.kept == []


@pytest.mark.parametrize("is_cut", [True, False])
def test_reading_broken_gzip_is_located_where_reading_stopped(check: Check, good: Entries, is_cut: bool) -> None:
    """Compressed data that ends too early, or is not what it was, is damage; what came before counts."""
    packed = gzip.compress(text(good) * 40)
    log = packed[: len(packed) // 2] if is_cut else packed[:-8] + bytes(8)
    (violation,) = [each for each in check(log).findings.kept if each.rule == "damage"]
    assert ("ends too early" if is_cut else "cannot be read") in violation.text


def test_reading_wrong_types_leave_the_other_records_alone(check: Check, good: Entries) -> None:
    """A record with text for a number is told, and the figures are those of the good records."""
    bad = [dict(entry) for entry in good[:-1]]
    bad[8] = bad[8] | {"statistics": bad[8]["statistics"] | {"hits": "many"}}
    report = check(text(bad))
    assert {each.rule for each in report.findings.kept} == {"type", "final.count"}
    assert as_values(report, is_checked=True)["runs"][0]["stores"][0]["statistics"]["steps"] == 8


HOSTILE: list[dict[str, object]] = [
    {"seq": 1, "run_id": "r"},
    {"schema": ["expertstream/1"], "seq": [], "run_id": {}},
    {"event": ["process.final"], "level": [], "ts": 1},
    {"event": "process.final"},
    {"event": "process.final", "stores": [None, 1, {"store": "folded", "folded": 10**30}], "totals": []},
    {"event": "store.built", "store": 10**40, "settings": [], "versions": [], "record_bytes": {}},
    {"event": "store.built", "store": 1, "settings": {"stats_every": {"value": "²"}}, "record_bytes": ["1"]},
    {"event": "statistics", "store": True, "statistics": {"steps_by_kind": []}},
    {"event": "store.closed", "store": -1, "statistics": None},
    {"seq": 10**300, "mono_ns": 1e300, "dropped": "3", "code": 5, "level": "error"},
    {"seq": 2**62, "mono_ns": 2**62, "level": "error", "code": "\ud800"},
]


def test_reading_hostile_entries_never_raise(check: Check, good: Entries) -> None:
    """Whatever the values of an entry are, they are told or ignored; nothing is raised."""
    base = {name: good[0][name] for name in ("schema", "event", "ts", "mono_ns", "seq", "run_id", "pid", "level")}
    report = check([entry | {} for entry in HOSTILE], [base | {"seq": i + 1} | e for i, e in enumerate(HOSTILE)])
    values = as_values(report, is_checked=True)
    assert values["num_violations"] > len(HOSTILE)
    json.dumps(values, allow_nan=False)


def test_reading_order_of_rotated_logs_does_not_matter(check: Check, good: Entries) -> None:
    """Rotated logs are sorted by their first entries: a shell lists the newest first."""
    report = check(text(good[6:]), gzip.compress(text(good[:2])), text(good[2:6]))
    assert report.findings.kept == []
    assert [log.name[-7:] for log in report.logs] == ["1.jsonl", "2.jsonl", "0.jsonl"]


def test_reading_stdin_is_read_once_with_the_files(good: Entries, tmp_path: Path) -> None:
    """A "-" among the logs is stdin, compressed or not, and shares the sequences of the files."""
    path = tmp_path / "first.jsonl"
    path.write_bytes(text(good[:5]))
    for rest in (text(good[5:]), gzip.compress(text(good[5:]))):
        report = read_logs(["-", str(path), "-"], stdin=io.BytesIO(rest))
        assert (report.findings.kept, len(report.logs)) == ([], 2)


def test_reading_threads_that_write_numbers_in_the_other_order_break_nothing(check: Check, good: Entries) -> None:
    """Contract 4.1: two numbers may be written in the other order; they are compared as numbered."""
    log = list(good)
    log[3], log[4] = log[4], log[3]
    assert check(log).findings.kept == []
    (run,) = as_values(check(log[:5]), is_checked=True)["runs"]
    assert run["stores"][0]["statistics"]["steps"] == 8, "the latest is the one with the larger number"


def grown(good: Entries, num_periodic: int) -> Entries:
    """A log of one store with many periodic records, every one of them sound."""
    record = good[4]["statistics"]
    kinds = record["steps_by_kind"]
    log = [good[0], good[1]]
    for index in range(1, num_periodic):
        counts = record | {"steps": 4 * index, "steps_by_kind": kinds | {"paged": 4 * index}, "step_ns": 10**9 + index}
        log.append(good[3] | {"seq": index + 2, "statistics": counts | {"stall_ns": 0}})
    last = log[-1]["statistics"]
    log.append(good[9] | {"seq": num_periodic + 2, "totals": last, "stores": [{"store": 1, "statistics": last}]})
    return log


def test_reading_memory_does_not_grow_with_the_log(good: Entries, tmp_path: Path) -> None:
    """A log is read in constant memory: one four times as long needs no more."""
    peaks = []
    for num_periodic in (2000, 8000):
        path = tmp_path / f"{num_periodic}.jsonl"
        path.write_bytes(text(grown(good, num_periodic)))
        tracemalloc.start()
        try:
            report = read_logs([str(path)])
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert report.findings.kept == []
        assert report.logs[0].num_entries == num_periodic + 2
    assert path.stat().st_size > 6_000_000
    assert peaks[1] < 300_000
    assert peaks[1] < peaks[0] + 50_000
    assert peaks[1] > 1000, "the measurement saw nothing"


def test_reading_log_that_is_wrong_everywhere_stays_bounded(check: Check, good: Entries) -> None:
    """Of violations and damaged ranges the first 1000 are kept and all are counted."""
    bad = good[3] | {"statistics": good[3]["statistics"] | {"hits": 0}}
    lines = [line for i in range(1500) for line in (bad | {"seq": i + 3}, "{")]
    report = check([*good[:2], *lines])
    assert (report.logs[0].num_damaged, len(report.logs[0].damaged)) == (1500, 1000)
    assert (len(report.findings.kept), report.findings.num_found > 2500) == (1000, True)
