"""What shows only when all logs are read: numbers that are in none of them, and whether the entries fit together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from . import counts as figures
from .findings import Findings, LogRead, Place
from .runs import Final, Run

__all__ = ["finish"]

# More ranges than this are one violation that counts them.
_MAX_GAPS = 100
_RUN_ID = re.compile(r'"run_id":\s*"([^"]*)"')


def finish(run: Run, logs: Iterable[LogRead], findings: Findings) -> None:
    """Adds the violations that show at the end of a run.

    Args:
        run: Everything that was read of it.
        logs: All logs.
        findings: Where the violations go.
    """
    _check_numbers(run, findings)
    _check_stores(run, findings)
    _check_request(run, findings)
    if run.final is not None:
        _check_final(run, run.final, findings)
    elif (run.requested or run.stores) and not is_cut_off(run, logs):
        place = run.last.place if run.last is not None else run.first_place
        text = "no process.final: the exit was not run, or not yet"
        findings.add(place, run.run_id, "final.count", text)


def is_cut_off(run: Run, logs: Iterable[LogRead]) -> bool:
    """Whether the log that holds the last entry of the run ends in a cut line that may be of this run."""
    for log in logs:
        if log.cut is not None and run.last is not None and run.last.place.file == log.name:
            named = _RUN_ID.search(log.cut[1])
            if named is None or named[1] == run.run_id:
                return True
    return False


def _check_numbers(run: Run, findings: Findings) -> None:
    gaps = run.numbers.missing()
    for first, last in islice(gaps, _MAX_GAPS):
        numbers = f"seq {first}" if first == last else f"seq {first} to {last}"
        text = f"{numbers} of the run ({last - first + 1}) missing from all logs before this line"
        findings.add(run.place_of_missing(first), run.run_id, "sequence.gap", text)
    rest = sum(last - first + 1 for first, last in gaps)
    if rest:
        text = f"{rest} more numbers of the run are missing from all logs"
        findings.add(run.first_place, run.run_id, "sequence.gap", text)


def _check_stores(run: Run, findings: Findings) -> None:
    for store in run.stores.values():
        if store.first is None:
            continue
        if store.built is None:
            text = f"an entry of store {store.serial}, which has no store.built"
            findings.add(store.first.place, run.run_id, "store.unknown", text)
        elif store.first.number < store.built.number:
            text = (
                f"an entry of store {store.serial} with seq {store.first.number}, before its store.built with "
                f"seq {store.built.number} at {store.built.place}"
            )
            findings.add(store.first.place, run.run_id, "store.unknown", text)


def _check_request(run: Run, findings: Findings) -> None:
    said = [store.built for store in run.stores.values() if store.built is not None]
    said += [] if run.final is None else [run.final]  # type: ignore[list-item]
    if not said:
        return
    first = min(said, key=lambda told: told.number)
    if run.requested is None:
        findings.add(first.place, run.run_id, "shape", "a store or a final record without streaming.requested")
    elif first.number < run.requested.number:
        text = f"seq {first.number} comes before streaming.requested with seq {run.requested.number}"
        findings.add(first.place, run.run_id, "shape", text)


def _check_final(run: Run, final: Final, findings: Findings) -> None:
    def say(rule: str, text: str, place: Place = final.place) -> None:
        findings.add(place, run.run_id, rule, text)

    if final.totals is not None and final.parts is not None:
        for text in figures.differences(final.totals, final.parts):
            say("final.totals", f"totals is not the sum over stores: {text}")
    has_stores = bool(final.serials or final.num_folded)
    if has_stores and final.reason is not None:
        say("shape", f"reason says why no store was built, and {len(final.serials)} are listed")
    if not has_stores and final.reason is None:
        say("shape", "stores is empty, and reason does not say why")
    for serial in sorted(final.serials):
        store = run.stores.get(serial)
        if store is None or store.built is None:
            say("store.unknown", f"process.final lists store {serial}, which has no store.built")
        elif store.closed is not None and store.closed.number < final.number and serial in final.stores:
            for text in figures.differences(final.stores[serial], store.closed.counts):
                say("final.store", f"store {serial} is not as its store.closed at {store.closed.place}: {text}")
    earlier = [s for s in run.stores.values() if s.built is not None and s.built.number < final.number]
    unlisted = sorted(store.serial for store in earlier if store.serial not in final.serials)
    if len(unlisted) > final.num_folded:
        some = ", ".join(map(str, unlisted[:8]))
        text = f"{len(unlisted)} stores built before are not listed ({some}), {final.num_folded} are folded"
        say("final.store", text)
