"""The shapes of a run, each told from its cause."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from expertstream.scheduler.report.ending import is_cut_off
from expertstream.scheduler.report.reading import Report
from expertstream.scheduler.report.shapes import shape_of

Entries = list[Any]
Check = Callable[..., Report]


def never_built(good: Entries, **fields: object) -> Entries:
    """Requested, refused, and a final record that says so."""
    zero = dict.fromkeys(good[-1]["totals"], 0) | {
        "steps_by_kind": dict.fromkeys(good[3]["statistics"]["steps_by_kind"], 0)
    }
    final = good[-1] | {
        "seq": 2,
        "stores": [],
        "totals": zero,
        "reason": "not a Mixture of Experts",
        "flushed_by": None,
    }
    return [good[0], final | fields]


def flushed(good: Entries) -> Entries:
    """The final record was taken early, and the store was closed afterwards."""
    final, closed = copy.deepcopy(good[-1]), copy.deepcopy(good[-1]["stores"][0])
    closed["statistics"]["advised"] += 1
    entry = good[7] | {"seq": 11, "store": 1, "statistics": closed["statistics"]}
    return [*good[:-1], final | {"flushed_by": "the host"}, entry]


# Which rows of docs/statistics.md: the name, words, and the rules that are broken all the same.
SHAPES: dict[str, tuple[Callable[[Entries], Entries], str, str, list[str]]] = {
    "not requested": (lambda good: [good[5] | {"seq": 1}], "not_requested", "streaming was not requested", []),
    "no exit": (lambda good: good[:1], "no_exit", "not run, or not yet, before a store was built", ["final.count"]),
    "never built": (never_built, "never_built", "requested and never built: not a Mixture of Experts", []),
    "ran": (lambda good: good, "ran", "it ran to its exit", []),
    "no exit after building": (lambda good: good[:9], "no_exit_built", "after a store was built", ["final.count"]),
    "flushed": (flushed, "flushed", "flushed early by the host; later totals are in store.closed", []),
    "inconsistent": (lambda good: [good[1] | {"seq": 1}], "inconsistent", "nothing says", ["shape", "final.count"]),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_runs_are_told(check: Check, good: Entries, name: str) -> None:
    """Contract 4.5: each row of the table has its name and its words."""
    make, shape, words, rules = SHAPES[name]
    report = check(make(good))
    (run,) = report.runs.values()
    found = shape_of(run, is_cut_off=is_cut_off(run, report.logs))
    assert found.name == shape
    assert words in found.words
    assert [each.rule for each in report.findings.kept] == rules


def test_shapes_of_a_log_that_lost_entries_are_qualified(check: Check, good: Entries) -> None:
    """Contract 4.5: a log that lost entries can look like another row, and says so."""
    (run,) = check([good[0], *good[2:]]).runs.values()
    assert "entries are missing" in shape_of(run).words


def test_shapes_with_zero_steps_are_void(check: Check, good: Entries) -> None:
    """Contract 3.2: at 0 steps the clock never advanced, and the measurement is void."""
    zero = never_built(good)[1]
    record = {"store": 1, "statistics": zero["totals"]}
    report = check([good[0], good[1], zero | {"seq": 3, "reason": None, "stores": [record]}])
    assert report.findings.kept == []
    assert "void" in shape_of(next(iter(report.runs.values()))).words
