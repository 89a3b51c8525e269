"""What streaming came to in this process: requested, built, closed, and the one record at the end.

Nothing is registered at import. The first request registers the fork hook and the exit hook; there are no others.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from .at_exit import run_halts
from .process_local import ProcessLocal, watch_forks
from .sink import LogSink, write_final
from .statistics import Statistics

__all__ = [
    "StoreLedger",
    "flush_statistics",
    "next_store_serial",
    "not_built",
    "register_store",
    "streaming_requested",
]

MAX_CLOSED_STORES = 64
# Before `multiprocessing` closes its queues (10) and pools (15): a host may log through one of them.
_EXIT_PRIORITY = 100
_NOT_FINISHED = "open() did not finish"

# Goes on over a fork: the child may hold its parent's stores, and a serial must not mean two of them.
_serials = itertools.count(1)


class _ProcessState:
    """What one process knows of its streaming."""

    def __init__(self) -> None:
        # Re-entrant: a signal handler of the host may flush while this thread holds it.
        self.lock = threading.RLock()
        self.is_requested = False
        self.is_final_taken = False
        self.reason = _NOT_FINISHED
        self.sinks: list[LogSink] = []
        self.open: dict[int, StoreLedger] = {}
        self.closed: deque[tuple[int, Statistics]] = deque()
        self.num_folded = 0
        self.folded = Statistics.zero()

    def add_sink(self, sink: LogSink) -> None:
        """Keeps a sink for the final record unless others write to all its targets already."""
        known = frozenset[tuple[str, object]]().union(*(each.target_keys for each in self.sinks))
        if not sink.target_keys <= known:
            self.sinks.append(sink)

    def add_closed(self, serial: int, statistics: Statistics) -> None:
        self.open.pop(serial, None)
        self.closed.append((serial, statistics))
        if len(self.closed) > MAX_CLOSED_STORES:
            self.num_folded += 1
            self.folded += self.closed.popleft()[1]

    def take_final(self) -> bool:
        """Takes the one print; False when it was taken or streaming was never requested."""
        with self.lock:
            is_mine = self.is_requested and not self.is_final_taken
            self.is_final_taken |= is_mine
            return is_mine


_state = ProcessLocal(_ProcessState)


class StoreLedger:
    """What one store tells the log: periodic statistics, and its totals when it closes.

    Made by `register_store`. In a forked child the ledger of a parent's store says nothing.
    """

    def __init__(
        self,
        serial: int,
        sink: LogSink,
        snapshot: Callable[[], Statistics],
        stats_every: int,
        stats_min_ns: int,
        now_ns: Callable[[], int],
    ) -> None:
        self.serial = serial
        self._sink = sink
        self._snapshot: Callable[[], Statistics] | None = snapshot
        self._stats_every = stats_every
        self._stats_min_ns = stats_min_ns
        self._now_ns = now_ns
        self._last = Statistics.zero()
        self._told_ns: int | None = None
        self._home = _state.get()

    @property
    def is_closed(self) -> bool:
        """Whether the totals are final."""
        return self._snapshot is None

    def statistics(self) -> Statistics:
        """The totals now; of a closed store those at its end, and the last known ones where the snapshot raises."""
        if not self._is_home():
            return self._last
        with self._home.lock:
            if self._snapshot is not None:
                try:
                    self._last = self._snapshot()
                except Exception as error:  # one store's fault must not cost the record of the others
                    self._sink.entry("statistics.failed", "error", store=self.serial, error=error)
            return self._last

    def set_periodic(self, stats_every: int, stats_min_s: float) -> None:
        """Changes when `statistics` entries are due, from the next step on; arguments as in `register_store`."""
        _check_periodic(stats_every, stats_min_s)
        self._stats_every, self._stats_min_ns = stats_every, round(stats_min_s * 1e9)

    def step_ended(self) -> None:
        """Logs a `statistics` entry when one is due: every N steps, and not sooner than the floor allows."""
        if self._stats_every == 0 or self.is_closed or not self._is_home():
            return
        statistics = self.statistics()
        now_ns = self._now_ns()
        with self._home.lock:
            if statistics.steps == 0 or statistics.steps % self._stats_every:
                return
            if self._told_ns is not None and now_ns - self._told_ns < self._stats_min_ns:
                return
            self._told_ns = now_ns
        self._sink.entry("statistics", **_store_record(self.serial, statistics))

    def close(self) -> None:
        """Logs `store.closed` with the totals and keeps them for the final record; once, however often it is called."""
        if not self._is_home():
            return
        with self._home.lock:
            if self.is_closed:
                return
            statistics = self.statistics()
            self._snapshot = None
            self._home.add_closed(self.serial, statistics)
        self._sink.record("store.closed", **_store_record(self.serial, statistics))
        self._sink.close()

    def _is_home(self) -> bool:
        # Asked before any lock is taken: another thread may have held it when this process was forked off.
        return self._home is _state.get()

    def __repr__(self) -> str:
        return f"<StoreLedger {self.serial} {'closed' if self.is_closed else 'open'}: {self._last.steps} steps told>"


def streaming_requested(sink: LogSink, **fields: object) -> None:
    """Says, once per process, that streaming is asked for; from then on the process ends with one record.

    Args:
        sink: Where it is said, and where the final record goes; every later sink gets the final record as well.
        **fields: What is known before the checkpoint is read.
    """
    state = _state.get()
    with state.lock:
        state.add_sink(sink)
        if state.is_requested:
            return
        state.is_requested = True
    _register_hooks()
    sink.record("streaming.requested", **fields)


def not_built(reason: str) -> None:
    """Remembers why no store came of the latest request; the final record says so when none ever does."""
    state = _state.get()
    with state.lock:
        state.reason = reason


def next_store_serial() -> int:
    """Issues a store serial: unique in the process, never reused, and not one of the parent's after a fork."""
    return next(_serials)


def register_store(
    sink: LogSink,
    *,
    snapshot: Callable[[], Statistics],
    stats_every: int,
    stats_min_s: float,
    built: Mapping[str, object],
    serial: int | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> StoreLedger:
    """Logs `store.built` and accounts for the store from now on; counts as a request where none was made.

    Args:
        sink: Where this store's entries go.
        snapshot: Gives the store's totals; must need no event loop, new thread or device. Dropped when the ledger
            closes.
        stats_every: Steps between two periodic entries; 0 turns them off.
        stats_min_s: Least seconds between two periodic entries, on the monotonic clock; 0 is no floor.
        built: Fields of the `store.built` entry.
        serial: From `next_store_serial`, where the store was given one before; issued here otherwise.
        now_ns: Monotonic nanoseconds.

    Returns:
        The ledger, to be told of every ended step and of the end of the store.

    Raises:
        ValueError: `stats_every` or `stats_min_s` is negative or not finite, or `serial` is an open store's.
    """
    _check_periodic(stats_every, stats_min_s)
    streaming_requested(sink)
    number = next_store_serial() if serial is None else serial
    ledger = StoreLedger(number, sink, snapshot, stats_every, round(stats_min_s * 1e9), now_ns)
    with ledger._home.lock:
        if number in ledger._home.open:
            raise ValueError(f"serial {number} is that of a store that is open.")
        ledger._home.open[number] = ledger
    sink.record("store.built", **{**built, "store": number})
    return ledger


def _check_periodic(stats_every: int, stats_min_s: float) -> None:
    if stats_every < 0:
        raise ValueError(f"stats_every must be at least 0 steps, not {stats_every}.")
    if not (math.isfinite(stats_min_s) and stats_min_s >= 0):
        raise ValueError(f"stats_min_s must be a finite number of seconds of at least 0, not {stats_min_s}.")


def flush_statistics(by: str) -> bool:
    """Prints the final record now instead of at exit.

    Args:
        by: Who asks; becomes `flushed_by`.

    Returns:
        Whether it was printed: False when it had been, or when streaming was never requested in this process.

    Raises:
        ValueError: `by` is empty.
    """
    if not by:
        raise ValueError("by must name who flushes, not be empty.")
    return _print_final(by)


def _register_hooks() -> None:
    # Imported here: importing it registers an exit function of its own. `atexit` is skipped in the fork and forkserver
    # children of `multiprocessing` before Python 3.13; this runs in them too, and in every exit that runs any.
    from multiprocessing.util import Finalize

    watch_forks()
    Finalize(None, _end_process, exitpriority=_EXIT_PRIORITY)


def _end_process() -> None:
    """The exit hook: the record first, so that nothing that follows can cost it."""
    _print_final(None)
    run_halts()


def _print_final(flushed_by: str | None) -> bool:
    """The one print of the final record: called by the exit hook and by `flush_statistics`, guarded by one flag."""
    state = _state.get()
    if not state.take_final():
        return False
    with state.lock:
        ledgers = list(state.open.values())
        known = list(state.closed)
        totals, num_folded = state.folded, state.num_folded
    stores: list[object] = []
    if num_folded:
        stores.append({"store": "folded", "folded": num_folded, "statistics": totals.as_dict()})
    known += [(ledger.serial, ledger.statistics()) for ledger in ledgers]
    for serial, statistics in sorted(known, key=lambda pair: pair[0]):
        stores.append(_store_record(serial, statistics))
        totals += statistics
    reason = None if stores else state.reason
    write_final(
        state.sinks, "process.final", totals=totals.as_dict(), stores=stores, reason=reason, flushed_by=flushed_by
    )
    return True


def _store_record(serial: int, statistics: Statistics) -> dict[str, object]:
    return {"store": serial, "statistics": statistics.as_dict()}
