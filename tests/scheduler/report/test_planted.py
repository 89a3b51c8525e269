"""Corruptions planted in a good log, one at a time: each is found in its line, and a good log has none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expertstream.scheduler.report.reading import Report

Entry = dict[str, Any]
Entries = list[Any]
Check = Callable[..., Report]


def at(line: int, **fields: object) -> Callable[[Entries], None]:
    """Replaces fields of an entry."""
    return lambda log: log[line - 1].update(fields)


def figure(line: int, **fields: object) -> Callable[[Entries], None]:
    """Replaces figures of a `statistics` field."""
    return lambda log: log[line - 1]["statistics"].update(fields)


def of_store(index: int, **fields: object) -> Callable[[Entries], None]:
    """Replaces figures of one store of the final record."""
    return lambda log: log[-1]["stores"][index]["statistics"].update(fields)


def of_totals(**fields: object) -> Callable[[Entries], None]:
    """Replaces figures of the totals of the final record."""
    return lambda log: log[-1]["totals"].update(fields)


def without(line: int) -> Callable[[Entries], None]:
    """Leaves a line out."""
    return lambda log: log.pop(line - 1)


def repeated(line: int, **fields: object) -> Callable[[Entries], None]:
    """Appends a line once more, with other fields."""
    return lambda log: log.append(copy.deepcopy(log[line - 1]) | fields)


def instead(line: int, text: str) -> Callable[[Entries], None]:
    """Puts text in the place of a line."""
    return lambda log: log.__setitem__(line - 1, text)


def lacking(line: int, name: str) -> Callable[[Entries], None]:
    """Takes a field out of an entry."""
    return lambda log: log[line - 1].pop(name)


def text_of(line: int, old: str, new: str) -> Callable[[Entries], None]:
    """Replaces text within a line."""

    def plant(log: Entries) -> None:
        text = json.dumps(log[line - 1])
        assert old in text
        log[line - 1] = text.replace(old, new, 1)

    return plant


def fewer(log: Entries) -> None:
    """The second record of store 1 says less than the first, and reconciles in itself."""
    first = dict(log[3]["statistics"])
    log[4]["statistics"] = first | {
        "steps": 8,
        "steps_by_kind": first["steps_by_kind"] | {"paged": 8},
        "tokens_decode": 3,
    }


def final_below_periodic(log: Entries) -> None:
    """Store 1 and the totals of the final record have one draft token less than the last periodic record."""
    for figures in (log[-1]["stores"][0]["statistics"], log[-1]["totals"]):
        figures["tokens_drafted"] -= 3


def final_unlike_closed(log: Entries) -> None:
    """Store 2 went on in the final record after it was closed, in a way that adds up."""
    for figures in (log[-1]["stores"][1]["statistics"], log[-1]["totals"]):
        figures["advised"] += 1


def folded_away(log: Entries) -> None:
    """Store 2 is folded, and the entry claims no store."""
    log[-1]["stores"][1]["store"] = "folded"


def swapped(log: Entries) -> None:
    """store.built of store 2 has a number after the store's first record, which has its number."""
    log[2]["seq"], log[6]["seq"] = log[6]["seq"], log[2]["seq"]


PLANTED: dict[str, tuple[Callable[[Entries], object], int, str, str]] = {
    "lookups do not add up": (figure(4, hits=5), 4, "invariant", "lookups 16 is not hits 5 + joins 4"),
    "misses do not add up": (figure(5, fills_failed=1), 5, "invariant", "misses 16 is not fills 16 + fills_failed 1"),
    "prefetches do not add up": (figure(8, prefetch_wasted=1), 8, "invariant", "prefetch_issued 10 is not"),
    "more evictions than fills": (figure(4, evictions=17), 4, "invariant", "evictions 17 exceeds"),
    "more stalls than steps": (figure(4, stall_ns=10**15), 4, "invariant", "stall_ns 1000000000000000 exceeds"),
    "steps without a kind": (
        figure(4, steps_by_kind={"paged": 3, "draft": 0, "dense": 0, "replay": 0}),
        4,
        "invariant",
        "steps 4 is not the sum of steps_by_kind",
    ),
    "negative": (figure(7, waves=-1), 7, "invariant", "waves is negative: -1"),
    "bytes of other records": (figure(4, bytes=513), 4, "invariant", "bytes 513 cannot be those of fills 8"),
    "invariant in a store of the final": (of_store(0, hits=99), 10, "invariant", "stores[0].statistics: lookups"),
    "invariant in the totals": (of_totals(hits=99), 10, "invariant", "totals: lookups"),
    "totals are no sum": (of_totals(advised=1), 10, "final.totals", "advised 1, not 0"),
    "a counter falls": (fewer, 5, "monotonic", "store 1: tokens_decode fell from 4 to 3 since statistics at"),
    "final below periodic": (
        final_below_periodic,
        10,
        "monotonic",
        "tokens_drafted fell from 12 to 11 since statistics",
    ),
    "final unlike closed": (final_unlike_closed, 10, "final.store", "store 2 is not as its store.closed"),
    "an entry is gone": (without(6), 6, "sequence.gap", "seq 6 of the run (1) missing"),
    "the first entries are gone": (
        lambda log: log.__delitem__(slice(2)),
        1,
        "sequence.gap",
        "seq 1 to 2 of the run (2)",
    ),
    "an entry twice": (repeated(5), 11, "sequence.duplicate", "seq 5 of the run"),
    "two entries of one number": (at(5, seq=4), 5, "sequence.duplicate", "seq 4 of the run"),
    "no final": (without(10), 9, "final.count", "no process.final"),
    "two finals": (repeated(10, seq=11), 11, "final.count", "a second process.final: the first is seq 10 at"),
    "a store that was never built": (without(3), 6, "store.unknown", "an entry of store 2, which has no store.built"),
    "an entry before its store": (swapped, 7, "store.unknown", "with seq 3, before its store.built with seq 7"),
    "a serial twice": (repeated(3, seq=11), 11, "store.serial", "store 2 was built before, at"),
    "closed twice": (repeated(8, seq=11), 11, "store.closed", "store 2 was closed before, at"),
    "a store listed twice": (
        lambda log: log[-1]["stores"].append(log[-1]["stores"][0]),
        10,
        "store.serial",
        "stores lists store 1 twice",
    ),
    "a store that is not listed": (lambda log: log[-1]["stores"].pop(), 10, "final.store", "(2), 0 are folded"),
    "folded is no number": (folded_away, 10, "type", "stores[1].store is the text 'folded', not a serial"),
    "a step between two records": (
        text_of(
            4,
            '"steps": 4, "steps_failed": 0, "steps_by_kind": {"paged": 4',
            '"steps": 5, "steps_failed": 0, "steps_by_kind": {"paged": 5',
        ),
        4,
        "periodic",
        "at steps 5, where stats_every is 4",
    ),
    "periodic though turned off": (
        text_of(3, '"stats_every": {"value": "4"', '"stats_every": {"value": "0"'),
        7,
        "periodic",
        "stats_every is 0",
    ),
    "no schema": (lacking(4, "schema"), 4, "schema", "schema is null, not expertstream/1"),
    "another schema": (at(4, schema="expertstream/2"), 4, "schema", "the text 'expertstream/2'"),
    "text for a count": (figure(5, hits="8"), 5, "type", "statistics: hits is the text '8', not an integer"),
    "a boolean for a count": (figure(5, waves=False), 5, "type", "waves is false"),
    "a fraction for a count": (of_totals(hits=1.5), 10, "type", "totals: hits is 1.5"),
    "a count that is gone": (lambda log: log[4]["statistics"].pop("joins"), 5, "type", "joins is missing"),
    "a huge count": (figure(5, host_ns=10**400), 5, "type", "host_ns is a huge number"),
    "kinds that are no object": (figure(5, steps_by_kind=8), 5, "type", "steps_by_kind is 8, not an object"),
    "NaN for a count": (figure(5, stall_ns=float("nan")), 5, "damage", "holds NaN, which is not JSON"),
    "infinity in another field": (at(6, share=float("-inf")), 6, "damage", "holds -Infinity"),
    "text for a number of slots": (at(2, slots="8"), 2, "type", "slots is the text '8', not a count"),
    "text for a serial": (at(4, store="1"), 4, "type", "store is the text '1', not a serial"),
    "text for seq": (at(4, seq="4"), 4, "type", "seq is the text '4'"),
    "a number for run_id": (at(4, run_id=7), 4, "type", "run_id is 7, not a text"),
    "an unknown level": (at(6, level="loud"), 6, "type", "level is the text 'loud'"),
    "a flush by nobody": (at(10, flushed_by=""), 10, "type", "flushed_by is the text ''"),
    "a reason though stores were built": (at(10, reason="refused"), 10, "shape", "reason says why no store"),
    "no stores and no reason": (at(10, stores=[]), 10, "shape", "stores is empty, and reason does not say why"),
    "never requested": (at(1, event="other"), 2, "shape", "without streaming.requested"),
    "a store before the request": (
        lambda log: [log[0].update(seq=2), log[1].update(seq=1)],
        2,
        "shape",
        "seq 1 comes before streaming.requested with seq 2",
    ),
    "requested twice": (repeated(1, seq=11), 11, "shape", "a second streaming.requested"),
    "half a line in the middle": (instead(6, '{"schema": "expertstr'), 6, "damage", "line 6: not JSON"),
    "a list in the middle": (instead(6, "[1, 2]"), 6, "damage", "line 6: not a JSON object"),
}


def test_planted_nothing_in_good_logs_is_found(check: Check, good: Entries, split: tuple[Entries, Entries]) -> None:
    """Contract 3.3: a log of the library reconciles; one whose process has two logs does with both, in any order."""
    assert check(good).findings.kept == []
    assert check(*split).findings.kept == []
    assert check(*reversed(split)).findings.kept == []
    assert check(good, *split).findings.kept == []


@pytest.mark.parametrize("name", PLANTED)
def test_planted_corruption_is_found_in_its_line(check: Check, good: Entries, tmp_path: Path, name: str) -> None:
    """Contract 3.3: each corruption of a good log is a violation with the file, the line, the rule and the figures."""
    plant, line, rule, text = PLANTED[name]
    log = copy.deepcopy(good)
    plant(log)
    found = check(log).findings
    places = [(each.place, each.rule) for each in found.kept if text in each.text]
    assert places == [((str(tmp_path / "0.jsonl"), line), rule)], found.kept


def test_planted_gap_in_one_of_two_logs_is_found_in_that_log(
    check: Check, split: tuple[Entries, Entries], tmp_path: Path
) -> None:
    """Contract 4.1: numbers are looked for in all logs of a process, and one log alone lacks those of the other."""
    first, second = copy.deepcopy(split)
    gone = second.pop(1)["seq"]
    found = check(first, second).findings.kept
    assert [(each.rule, f"seq {gone} " in each.text) for each in found] == [("sequence.gap", True)]
    assert {each.rule for each in check(first).findings.kept} == {"sequence.gap", "store.unknown"}


def test_planted_corruption_of_a_second_copy_is_found(check: Check, good: Entries, tmp_path: Path) -> None:
    """An entry that two logs hold counts once, and its record is checked in both."""
    copied = copy.deepcopy(good)
    copied[3]["statistics"]["hits"] += 1
    report = check(good, copied)
    assert [each.place for each in report.findings.kept] == [(str(tmp_path / "1.jsonl"), 4)]
    (run,) = report.runs.values()
    assert (run.num_entries, run.num_repeated) == (10, 10)
