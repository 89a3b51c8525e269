"""The step clock: the one boundary of a forward, which refuses to nest and ends every step exactly once."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from ..memory.outcome import Outcome

__all__ = ["STEP_KINDS", "NestedStepError", "OverlappingStepError", "Step", "StepClock", "StepKind", "StepRecord"]

StepKind = Literal["paged", "draft", "dense", "replay"]
ScopeKind = StepKind | Literal["calibration"]

STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)

# One variable for every clock: a forward of one engine inside a forward of another is a nest too.
# What it holds counts only while `is_open`, so it is never reset by token and may be left in a task's own context.
_flow_step: ContextVar[Step | None] = ContextVar("expertstream_flow_step", default=None)


class NestedStepError(RuntimeError):
    """Raised when a forward is entered while a step is open in the same logical flow."""

    def __init__(self, open_kind: str, open_index: int, refused_kind: str) -> None:
        # The fields are the arguments, so that the error survives pickling between processes.
        super().__init__(open_kind, open_index, refused_kind)
        self.open_kind = open_kind
        self.open_index = open_index
        self.refused_kind = refused_kind

    def __str__(self) -> str:
        return (
            f"Steps must not nest: a {self.refused_kind} forward was entered while "
            f"{self.open_kind} step {self.open_index} is open in the same flow."
        )


class OverlappingStepError(RuntimeError):
    """Raised when a forward is entered while another flow has a step open on the same clock."""

    def __init__(self, open_kind: str, open_index: int, refused_kind: str) -> None:
        super().__init__(open_kind, open_index, refused_kind)
        self.open_kind = open_kind
        self.open_index = open_index
        self.refused_kind = refused_kind

    def __str__(self) -> str:
        return (
            f"Steps must not overlap on one clock: a {self.refused_kind} forward was entered while another flow has "
            f"{self.open_kind} step {self.open_index} open. The engine queues forwards: go through it."
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one ended step did; durations in nanoseconds of the clock's monotonic time."""

    kind: StepKind
    index: int
    failed: bool
    step_ns: int
    host_ns: int
    tokens_prefill: int
    tokens_decode: int
    tokens_drafted: int
    tokens_accepted: int
    outcome: Outcome


class Step:
    """One open forward, which collects its outcome until it ends; adding to an ended one raises `RuntimeError`."""

    __slots__ = ("_ended_ns", "_host_ns", "_lock", "_outcome", "_started_ns", "_tokens", "index", "kind")

    def __init__(self, kind: ScopeKind, index: int, started_ns: int, lock: threading.RLock) -> None:
        self.kind = kind
        self.index = index
        self._lock = lock
        self._started_ns = started_ns
        self._ended_ns: int | None = None
        self._host_ns = 0
        self._tokens = (0, 0, 0, 0)
        self._outcome = Outcome()

    @property
    def is_open(self) -> bool:
        """Whether the forward is still running."""
        return self._ended_ns is None

    @property
    def outcome(self) -> Outcome:
        """The sum of what was added so far; of a calibration it is all that is kept."""
        return self._outcome

    @property
    def duration_ns(self) -> int:
        """Monotonic nanoseconds from opening to end; 0 while open."""
        return 0 if self._ended_ns is None else max(0, self._ended_ns - self._started_ns)

    def add(self, outcome: Outcome) -> None:
        """Adds what a look-up, a copy or a read of this step did.

        Raises:
            RuntimeError: The step has ended.
        """
        with self._lock:
            self._check_open()
            self._outcome = self._outcome + outcome

    def count_tokens(self, prefill: int = 0, decode: int = 0, drafted: int = 0, accepted: int = 0) -> None:
        """Counts rows processed by phase, and drafts proposed and accepted.

        Raises:
            ValueError: A count is negative.
            RuntimeError: The step has ended.
        """
        counts = (prefill, decode, drafted, accepted)
        if min(counts) < 0:
            raise ValueError(f"Token counts must be at least 0: prefill, decode, drafted, accepted = {counts}.")
        with self._lock:
            self._check_open()
            a, b, c, d = self._tokens
            self._tokens = (a + prefill, b + decode, c + drafted, d + accepted)

    def add_host_ns(self, ns: int) -> None:
        """Adds event-loop work done inside this step, in nanoseconds.

        Raises:
            ValueError: `ns` is negative.
            RuntimeError: The step has ended.
        """
        if ns < 0:
            raise ValueError(f"ns must be at least 0, not {ns}.")
        with self._lock:
            self._check_open()
            self._host_ns += ns

    def _check_open(self) -> None:
        if not self.is_open:
            raise RuntimeError(f"Cannot add to {self.kind} step {self.index}: it has ended.")

    def _end(self, now_ns: int) -> None:
        self._ended_ns = now_ns

    def _record(self, kind: StepKind, failed: bool) -> StepRecord:
        return StepRecord(kind, self.index, failed, self.duration_ns, self._host_ns, *self._tokens, self._outcome)

    def __repr__(self) -> str:
        state = "open" if self.is_open else f"ended after {self.duration_ns} ns"
        return f"<Step {self.kind} {self.index}: {state}>"


class StepClock:
    """Counts the forwards of one engine; `step` is the only way into a forward.

    Args:
        now_ns: Monotonic nanoseconds.
        on_end: Receives the record of every ended step, in the flow that ran it, after the clock has advanced.
            If it raises, the step has ended all the same: the error propagates from the `with` block, or becomes a note
            on the body's own exception where there is one.
    """

    def __init__(
        self, *, now_ns: Callable[[], int] = time.perf_counter_ns, on_end: Callable[[StepRecord], None] | None = None
    ) -> None:
        self._now_ns = now_ns
        self._on_end = on_end
        # Re-entrant: a signal handler may run, and read the clock, inside any of the blocks below.
        self._lock = threading.RLock()
        self._open_step: Step | None = None
        self._steps_failed = 0
        self._steps_by_kind: dict[StepKind, int] = dict.fromkeys(STEP_KINDS, 0)
        self._calibrations = 0

    @property
    def steps(self) -> int:
        """Steps ended, of any kind."""
        with self._lock:
            return sum(self._steps_by_kind.values())

    @property
    def steps_failed(self) -> int:
        """Of the ended steps, those that raised or were cancelled."""
        return self._steps_failed

    @property
    def steps_by_kind(self) -> dict[StepKind, int]:
        """Steps ended per kind, zeros present; a copy."""
        with self._lock:
            return dict(self._steps_by_kind)

    @property
    def calibrations(self) -> int:
        """Warm-up, capture and calibration scopes ended; never steps."""
        return self._calibrations

    @contextmanager
    def step(self, kind: StepKind) -> Iterator[Step]:
        """Opens a step and ends it once, also when the body raises or is cancelled.

        Args:
            kind: One of `STEP_KINDS`.

        Raises:
            NestedStepError: A step of any clock is open in this flow. Nothing was charged; the open step stays open.
            OverlappingStepError: Another flow has a step open on this clock. Nothing was charged.
            ValueError: `kind` is not one of the four.
        """
        if kind not in STEP_KINDS:
            raise ValueError(f"kind must be one of {', '.join(STEP_KINDS)}, not {kind!r}.")
        step = self._open(kind)
        try:
            yield step
        except BaseException as error:
            self._end(step, kind, error)
            raise
        self._end(step, kind, None)

    @contextmanager
    def calibration(self) -> Iterator[Step]:
        """Opens a scope that is guarded like a step and is none: it counts in `calibrations` only.

        What is added to the yielded scope stays in its `outcome`.

        Raises:
            NestedStepError: As `step`.
            OverlappingStepError: As `step`.
        """
        scope = self._open("calibration")
        try:
            yield scope
        finally:
            with self._lock:
                self._close(scope)
                self._calibrations += 1

    def check(self, kind: ScopeKind) -> None:
        """Refuses what would be refused if it were opened here: the same check, for work that is queued first.

        Raises:
            NestedStepError: A step of any clock is open in this flow.
        """
        inside = _flow_step.get()
        if inside is not None and inside.is_open:
            raise NestedStepError(inside.kind, inside.index, kind)

    def _open(self, kind: ScopeKind) -> Step:
        self.check(kind)
        with self._lock:
            other = self._open_step
            if other is not None:
                raise OverlappingStepError(other.kind, other.index, kind)
            index = 1 + (self._calibrations if kind == "calibration" else sum(self._steps_by_kind.values()))
            step = self._open_step = Step(kind, index, self._now_ns(), self._lock)
        _flow_step.set(step)
        return step

    def _close(self, step: Step) -> None:
        step._end(self._now_ns())
        self._open_step = None
        if _flow_step.get() is step:
            _flow_step.set(None)

    def _end(self, step: Step, kind: StepKind, error: BaseException | None) -> None:
        with self._lock:
            self._close(step)
            self._steps_failed += error is not None
            self._steps_by_kind[kind] += 1
            record = step._record(kind, error is not None)
        if self._on_end is None:
            return
        try:
            self._on_end(record)
        except Exception as failure:
            if error is None:
                raise
            told = "".join(traceback.format_exception_only(failure)).strip()
            error.add_note(f"The end of {kind} step {step.index} could not be told: {told}")

    def __repr__(self) -> str:
        open_step = self._open_step
        state = "idle" if open_step is None else f"{open_step.kind} {open_step.index} open"
        return f"<StepClock {self.steps} steps, {self.steps_failed} failed: {state}>"
