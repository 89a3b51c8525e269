"""A report for a person: titled lists of names and values, in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Section", "sections_of"]

# What is shown on a screen; --json has more.
_MAX_RANGES = 20
_MAX_VIOLATIONS = 100


class Section(NamedTuple):
    """A title and rows of a name and a value."""

    title: str
    rows: list[tuple[str, str]]


def sections_of(values: Mapping[str, Any]) -> Iterator[Section]:
    """Yields what `summary.as_values` returned, a section for each log, run and store, and one for the violations."""
    for log in values["logs"]:
        yield Section(f"log {log['file']}", list(_log_rows(log)))
    for run in values["runs"]:
        yield Section(f"run {run['run_id']}", list(_run_rows(run)))
        for store in run["stores"]:
            yield Section(f"store {store['store']} of run {run['run_id'][:8]}", list(_store_rows(store)))
        if run["totals"] is not None and (len(run["stores"]) > 1 or run["num_folded"]):
            yield Section(f"totals of run {run['run_id'][:8]}", list(_figure_rows(run["totals"])))
    if "violations" in values:
        yield Section(f"violations: {values['num_violations'] or 'none'}", list(_violation_rows(values)))


def _log_rows(log: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "lines", f"{log['num_lines']} ({log['num_entries']} entries, {log['num_others']} of others)"
    if log["num_damaged"]:
        yield "damaged lines", str(log["num_damaged"])
    for damage in log["damaged"][:_MAX_RANGES]:
        lines = str(damage["first"]) if damage["first"] == damage["last"] else f"{damage['first']}-{damage['last']}"
        yield f"{log['file']}:{lines}", damage["reason"]
    if len(log["damaged"]) > _MAX_RANGES:
        yield "more damage", f"{len(log['damaged']) - _MAX_RANGES} or more further ranges"
    if log["cut_line"] is not None:
        yield f"{log['file']}:{log['cut_line']}", "cut: the last line was not written to its end"


def _run_rows(run: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "meaning", run["meaning"]
    yield "process", f"pid {run['pid']}, from {run['first_ts']} to {run['last_ts']}"
    yield "duration", _seconds(run["duration_ns"])
    repeated = f", {run['num_repeated']} of them in another log too" if run["num_repeated"] else ""
    yield "entries", f"{run['num_entries']}{repeated}"
    if not run["is_sequence_followed"]:
        yield "missing", "not known: the numbers are strewn too widely"
    elif run["num_missing"]:
        ranges = ", ".join(f"{gap['first']}-{gap['last']}" for gap in run["missing"][:_MAX_RANGES])
        yield "missing", f"{run['num_missing']} (seq {ranges})"
    if run["num_dropped"]:
        yield "failed writes told", str(run["num_dropped"])
    for code, number in run["warnings"].items():
        yield f"warning {code}", f"{number}"


def _store_rows(store: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if store["is_built"]:
        yield "model", f"{store.get('model', 'unnamed')} ({store.get('model_type', 'type not told')})"
        yield "ran as", f"{store.get('dtype', '?')} on {store.get('device', '?')}"
        yield "slots", f"{store.get('slots', '?')} for {store.get('experts', '?')} experts"
        yield "policy", f"{store.get('policy', '?')}"
    if store["versions"]:
        yield "versions", ", ".join(f"{name} {version}" for name, version in store["versions"].items())
    if store["statistics"] is None:
        yield "statistics", "none in these logs"
        return
    yield "figures from", store["from"]
    yield from _figure_rows(store["statistics"])


def _figure_rows(c: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = ", ".join(f"{kind} {number}" for kind, number in c["steps_by_kind"].items() if number)
    failed = f"; {c['steps_failed']} failed" if c["steps_failed"] else ""
    yield "steps", f"{c['steps']}" + (f" ({kinds}{failed})" if kinds else "")
    yield "tokens", f"prefill {c['tokens_prefill']}, decode {c['tokens_decode']}"
    if c["tokens_drafted"]:
        accepted = f"{c['tokens_accepted']} of {c['tokens_drafted']}"
        yield "drafts accepted", f"{accepted} ({c['acceptance_rate']:.1%})"
    yield "lookups", f"{c['lookups']}"
    if c["lookups"]:
        yield "hits", f"{c['hits']} ({c['hit_rate']:.1%} of lookups)"
    yield "joins, misses", f"{c['joins']}, {c['misses']}"
    yield "exhausted", f"{c['exhausted']} ({c['bytes_in_place']:,} bytes read in place)"
    yield "fills", f"{c['fills']} ({c['bytes']:,} bytes), {c['fills_failed']} failed"
    yield "evictions, waves", f"{c['evictions']}, {c['waves']}"
    if c["prefetch_issued"]:
        parts = ", ".join(f"{name} {c[f'prefetch_{name}']}" for name in ("used", "late", "wasted", "pending"))
        yield "prefetch", f"{c['prefetch_issued']} ({parts}; {c['bytes_prefetch']:,} bytes)"
    if c["reads"] or c["bytes_disk"] or c["advised"]:
        yield "read from files", f"{c['reads']} experts ({c['bytes_disk']:,} bytes), {c['advised']} hints taken"
    if c["forced"]:
        yield "forced by a test", f"{c['forced']} lookups"
    yield "time in steps", _seconds(c["step_ns"])
    if c["step_ns"]:
        yield "stalls", f"{_seconds(c['stall_ns'])} ({c['stall_share']:.1%} of it)"
    yield "copies, host work", f"{_seconds(c['copy_ns'])}, {_seconds(c['host_ns'])}"


def _violation_rows(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    shown = values["violations"][:_MAX_VIOLATIONS]
    for each in shown:
        run = f" (run {each['run_id'][:8]})" if each["run_id"] else ""
        yield f"{each['file']}:{each['line']}", f"[{each['rule']}] {each['text']}{run}"
    if values["num_violations"] > len(shown):
        yield "not shown", f"{values['num_violations'] - len(shown)} more; --json has up to 1000"


def _seconds(ns: int | None) -> str:
    # Integers to the end: a float of a huge number would overflow.
    return "not told" if ns is None else f"{ns // 10**9:,}.{ns % 10**9 // 10**6:03} s"
