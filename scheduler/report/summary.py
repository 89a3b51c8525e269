"""A report as JSON values: figures as they are in the log, and rates made here of two figures of one record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .counts import as_mapping
from .ending import is_cut_off
from .findings import LogRead
from .reading import Report
from .runs import Run, Store
from .shapes import shape_of

__all__ = ["SUMMARY_SCHEMA", "as_values", "rate"]

SUMMARY_SCHEMA = "expertstream.report/1"
# Of each run that many ranges of missing numbers are listed.
_MAX_GAPS = 100


def as_values(report: Report, *, is_checked: bool) -> dict[str, Any]:
    """Returns a report as JSON values; the violations themselves only where they were asked for."""
    found = report.findings
    values: dict[str, Any] = {
        "schema": SUMMARY_SCHEMA,
        "logs": [_log(log) for log in report.logs],
        "runs": [_run(run, report.logs) for run in report.runs.values()],
        "num_violations": found.num_found,
    }
    return values | ({"violations": [each.as_dict() for each in found.kept]} if is_checked else {})


def rate(part: int, whole: int) -> float | None:
    """Returns `part / whole`, None where there is nothing to divide by."""
    return part / whole if whole else None


def _log(log: LogRead) -> dict[str, Any]:
    return {
        "file": log.name,
        "num_lines": log.num_lines,
        "num_entries": log.num_entries,
        "num_others": log.num_others,
        "num_damaged": log.num_damaged,
        "damaged": [{"first": first, "last": last, "reason": reason} for first, last, reason in log.damaged],
        "cut_line": None if log.cut is None else log.cut[0],
    }


def _run(run: Run, logs: Iterable[LogRead]) -> dict[str, Any]:
    gaps = [{"first": first, "last": last} for first, last in run.numbers.missing()]
    shape = shape_of(run, is_cut_off=is_cut_off(run, logs))
    final = run.final
    has_times = run.first_ns is not None and run.last_ns is not None
    return {
        "run_id": run.run_id,
        "pid": run.pid,
        "shape": shape.name,
        "meaning": shape.words,
        "first_ts": run.first_ts or None,
        "last_ts": run.last_ts or None,
        "duration_ns": run.last_ns - run.first_ns if has_times else None,  # type: ignore[operator]
        "num_entries": run.num_entries,
        "num_repeated": run.num_repeated,
        "num_missing": sum(gap["last"] - gap["first"] + 1 for gap in gaps),
        "missing": gaps[:_MAX_GAPS],
        "is_sequence_followed": run.numbers.is_followed and run.file_numbers.is_followed,
        "num_dropped": run.num_dropped,
        "warnings": dict(run.warnings.most_common()),
        "reason": None if final is None else final.reason,
        "flushed_by": None if final is None else final.flushed_by,
        "num_folded": 0 if final is None else final.num_folded,
        "totals": None if final is None or final.totals is None else _figures(final.totals),
        "stores": [_store(store) for store in sorted(run.stores.values(), key=lambda each: each.serial)],
    }


def _store(store: Store) -> dict[str, Any]:
    facts = store.facts
    return {
        "store": store.serial,
        **facts.texts,
        **facts.counts,
        "versions": dict(facts.versions),
        "is_built": store.built is not None,
        "is_closed": store.closed is not None,
        "from": None if store.latest is None else store.latest.event,
        "statistics": None if store.latest is None else _figures(store.latest.counts),
    }


def _figures(counts: tuple[int, ...]) -> dict[str, Any]:
    flat = as_mapping(counts)
    kinds = {name.partition(".")[2]: value for name, value in flat.items() if "." in name}
    values: dict[str, Any] = {name: value for name, value in flat.items() if "." not in name}
    return values | {
        "steps_by_kind": kinds,
        "hit_rate": rate(flat["hits"], flat["lookups"]),
        "stall_share": rate(flat["stall_ns"], flat["step_ns"]),
        "acceptance_rate": rate(flat["tokens_accepted"], flat["tokens_drafted"]),
    }
