"""What the six entries about the life of streaming say: each is checked by itself, and changes its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import counts as figures
from .counts import Counts, describe, is_count
from .facts import read_facts, wrong_facts
from .final import read_final
from .findings import Findings
from .runs import Final, Run, Sample, Store, Told

__all__ = ["Events"]

Entry = Mapping[str, Any]


class Events:
    """Takes the entries of one `schema`, of which the envelope was checked.

    Args:
        findings: Gets every violation that shows in an entry.
    """

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._by_name: dict[str, Callable[[Run, Entry, Told], None]] = {
            "streaming.requested": self._requested,
            "store.built": self._built,
            "statistics": self._periodic,
            "store.closed": self._closed,
            "statistics.failed": self._failed,
            "process.final": self._final,
        }

    def take(self, run: Run, entry: Entry, told: Told, *, is_repeated: bool) -> None:
        """Takes one entry; of one that another log holds too, only the record is checked again."""
        event = entry.get("event")
        if not isinstance(event, str) or event not in self._by_name:
            return
        if not is_repeated:
            self._by_name[event](run, entry, told)
        elif event in ("statistics", "store.closed"):
            self._record(run, entry.get("statistics"), told, "statistics")
        elif event == "process.final":
            self._read_final(run, entry, told)

    def _requested(self, run: Run, entry: Entry, told: Told) -> None:
        if run.requested is not None:
            text = f"a second streaming.requested: the first is seq {run.requested.number} at {run.requested.place}"
            self._say(run, told, "shape", text)
        run.requested = run.requested or told

    def _built(self, run: Run, entry: Entry, told: Told) -> None:
        for text in wrong_facts(entry):
            self._say(run, told, "type", text)
        store = self._store(run, entry, told)
        if store is None:
            return
        if store.built is not None:
            text = f"store {store.serial} was built before, at {store.built.place}: a serial is used once"
            self._say(run, told, "store.serial", text)
            return
        store.built, store.facts = told, read_facts(entry)

    def _periodic(self, run: Run, entry: Entry, told: Told) -> None:
        sample = self._sample(run, entry, told)
        if sample is None:
            return
        steps, every = sample.counts[0], run.stores[entry["store"]].facts.stats_every
        if every == 0:
            self._say(run, told, "periodic", "a periodic record, though stats_every is 0")
        elif steps == 0 or (every is not None and steps % every):
            self._say(run, told, "periodic", f"a periodic record at steps {steps}, where stats_every is {every}")

    def _closed(self, run: Run, entry: Entry, told: Told) -> None:
        sample = self._sample(run, entry, told)
        if sample is None:
            return
        store = run.stores[entry["store"]]
        if store.closed is not None:
            self._say(run, told, "store.closed", f"store {store.serial} was closed before, at {store.closed.place}")
        store.closed = store.closed or sample

    def _failed(self, run: Run, entry: Entry, told: Told) -> None:
        self._note_first(self._store(run, entry, told), told)

    def _final(self, run: Run, entry: Entry, told: Told) -> None:
        final = self._read_final(run, entry, told)
        if run.final is not None:
            text = f"a second process.final: the first is seq {run.final.number} at {run.final.place}"
            self._say(run, told, "final.count", text)
            return
        run.final = final
        for serial, record in final.stores.items():
            self._follow(run, run.store(serial), Sample(*told, "process.final", record))

    def _read_final(self, run: Run, entry: Entry, told: Told) -> Final:
        return read_final(
            entry,
            told,
            record=lambda value, where: self._record(run, value, told, where),
            say=lambda rule, text: self._say(run, told, rule, text),
        )

    def _sample(self, run: Run, entry: Entry, told: Told) -> Sample | None:
        store = self._store(run, entry, told)
        record = self._record(run, entry.get("statistics"), told, "statistics")
        self._note_first(store, told)
        if store is None or record is None:
            return None
        sample = Sample(*told, entry["event"], record)
        self._follow(run, store, sample)
        return sample

    def _store(self, run: Run, entry: Entry, told: Told) -> Store | None:
        serial = entry.get("store")
        if is_count(serial, 1):
            return run.store(serial)
        self._say(run, told, "type", f"store is {describe(serial)}, not a serial")
        return None

    def _note_first(self, store: Store | None, told: Told) -> None:
        if store is not None and (store.first is None or told.number < store.first.number):
            store.first = told

    def _record(self, run: Run, value: object, told: Told, where: str) -> Counts | None:
        record = figures.read(value)
        if isinstance(record, list):
            for text in record:
                self._say(run, told, "type", f"{where}: {text}")
            return None
        for text in figures.invariants(record):
            self._say(run, told, "invariant", f"{where}: {text}")
        return record

    def _follow(self, run: Run, store: Store, sample: Sample) -> None:
        """Compares a record with the one read before it and with the latest: the larger number has larger counts."""
        others = [store.latest] if store.latest is store.previous else [store.latest, store.previous]
        for other in others:
            if other is not None:
                self._compare(run, store, other, sample)
        store.previous = sample
        if store.latest is None or sample.number > store.latest.number:
            store.latest = sample
        if store.facts.record_bytes is not None:
            for text in figures.wrong_bytes(sample.counts, *store.facts.record_bytes):
                self._findings.add(sample.place, run.run_id, "invariant", f"store {store.serial}: {text}")

    def _compare(self, run: Run, store: Store, left: Sample, right: Sample) -> None:
        earlier, later = (left, right) if left.number < right.number else (right, left)
        for text in figures.falls(earlier.counts, later.counts):
            told = f"store {store.serial}: {text} since {earlier.event} at {earlier.place}"
            self._findings.add(later.place, run.run_id, "monotonic", told)

    def _say(self, run: Run, told: Told, rule: str, text: str) -> None:
        self._findings.add(told.place, run.run_id, rule, text)
