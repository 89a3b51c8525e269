"""The step clock: refusal of nests, ends on every way out, and what a step collects."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
import threading
from collections.abc import Iterator

import pytest

from expertstream.memory.outcome import Outcome
from expertstream.steps.clock import (
    STEP_KINDS,
    NestedStepError,
    OverlappingStepError,
    Step,
    StepClock,
    StepKind,
    StepRecord,
)


def ticking(step_ns: int = 10) -> Iterator[int]:
    now_ns = 0
    while True:
        yield now_ns
        now_ns += step_ns


def clock_with_records() -> tuple[StepClock, list[StepRecord]]:
    records: list[StepRecord] = []
    return StepClock(now_ns=ticking().__next__, on_end=records.append), records


@pytest.mark.parametrize("refused", STEP_KINDS)
@pytest.mark.parametrize("outer", STEP_KINDS)
def test_step_inside_open_step_is_refused_and_names_both(outer: StepKind, refused: StepKind) -> None:
    """Contract 1.3: a nest raises, and the message says "must not nest", the open step and the refused one."""
    clock, records = clock_with_records()
    with clock.step(outer) as step:
        with pytest.raises(NestedStepError, match="must not nest") as caught, clock.step(refused):
            pytest.fail("entered a nested step")
        assert step.is_open
    assert (caught.value.open_kind, caught.value.open_index, caught.value.refused_kind) == (outer, 1, refused)
    assert f"{outer} step 1" in str(caught.value)
    assert f"a {refused} forward" in str(caught.value)
    assert [(record.kind, record.failed) for record in records] == [(outer, False)]


def test_refusal_changes_nothing_and_is_not_sticky() -> None:
    """Contract 1.3: no step is charged, the open one closes once, and the same forward succeeds afterwards."""
    clock, records = clock_with_records()
    with clock.step("paged"):
        for _ in range(3):
            with pytest.raises(NestedStepError), clock.step("draft"):
                pass
    with clock.step("draft") as step:
        assert step.index == 2
    assert clock.steps_by_kind == {"paged": 1, "draft": 1, "dense": 0, "replay": 0}
    assert (clock.steps, clock.steps_failed, [record.index for record in records]) == (2, 0, [1, 2])


def test_step_inside_a_step_of_another_clock_is_refused() -> None:
    """Contract 1.3: the nest is a property of the flow, whichever engine's clock it enters."""
    first, second = StepClock(), StepClock()
    with first.step("paged"), pytest.raises(NestedStepError), second.step("dense"):
        pass
    with second.step("dense"):
        pass
    assert (first.steps, second.steps) == (1, 1)


def test_step_inside_a_thread_with_the_flow_of_an_open_step_is_refused() -> None:
    """Contract 1.3: the flow goes with its context, so that a step thread is inside the step that it works for."""
    clock, other = StepClock(), StepClock()
    with clock.step("paged"):
        run = contextvars.copy_context().run
        caught: list[BaseException] = []

        def nest() -> None:
            try:
                with other.step("dense"):
                    pass
            except NestedStepError as error:
                caught.append(error)

        thread = threading.Thread(target=run, args=(nest,))
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert other.steps == 0


@pytest.mark.anyio
async def test_background_task_is_inside_only_while_the_step_is_open() -> None:
    """Contract 1.3: a task started inside a step may outlive it, and may then enter a forward of its own."""
    clock, go_on, was_refused = StepClock(), asyncio.Event(), asyncio.Event()

    async def background() -> None:
        with pytest.raises(NestedStepError), clock.step("draft"):
            pass
        was_refused.set()
        await go_on.wait()
        with clock.step("draft"):
            pass

    with clock.step("paged"):
        task = asyncio.create_task(background())
        await was_refused.wait()
    go_on.set()
    await task
    assert clock.steps_by_kind["draft"] == 1


@pytest.mark.anyio
async def test_second_flow_on_a_busy_clock_is_told_to_queue() -> None:
    """Contract 1.3: forwards of two tasks are never overlapped on one clock; whoever bypasses the queue is told."""
    clock, is_open, go_on = StepClock(), asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        with clock.step("paged"):
            is_open.set()
            await go_on.wait()

    task = asyncio.create_task(hold())
    await is_open.wait()
    with pytest.raises(OverlappingStepError, match=r"paged step 1 open\. The engine queues"), clock.step("dense"):
        pass
    with StepClock().step("dense"):  # another clock is free
        pass
    go_on.set()
    await task
    with clock.step("dense"):
        pass
    assert clock.steps == 2


class Halt(BaseException):
    """Stands for what is no `Exception`, as a cancellation or Ctrl-C."""


@pytest.mark.parametrize("raised", [ValueError("body"), Halt(), KeyboardInterrupt()])
def test_step_that_raises_ends_once_and_is_counted_as_failed(raised: BaseException) -> None:
    """Contract 1.4: a step that raises still ends, the clock advances by one and steps_failed counts it."""
    clock, records = clock_with_records()

    def fail() -> None:
        with clock.step("dense") as step:
            step.add(Outcome(lookups=2, hits=2))
            raise raised

    with pytest.raises(type(raised)):
        fail()
    assert (clock.steps, clock.steps_failed) == (1, 1)
    assert [(record.failed, record.outcome.hits) for record in records] == [(True, 2)]
    with clock.step("dense"):
        pass
    assert (clock.steps, clock.steps_failed) == (2, 1)


@pytest.mark.anyio
async def test_step_that_is_cancelled_ends() -> None:
    """Contract 1.4: a step that shutdown cancels ends, is counted as failed, and frees the clock."""
    clock, is_open = StepClock(), asyncio.Event()

    async def forward() -> None:
        with clock.step("paged"):
            is_open.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(forward())
    await is_open.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with clock.step("paged"):
        pass
    assert (clock.steps, clock.steps_failed) == (2, 1)


def test_record_holds_what_the_step_collected() -> None:
    """A record sums what was added to the step, with durations of the monotonic clock (contract 1.5)."""
    clock, records = clock_with_records()
    with clock.step("paged") as step:
        step.add(Outcome(lookups=3, hits=1, misses=2, fills=2, bytes=20))
        step.add(Outcome(lookups=1, hits=1, stall_ns=4))
        step.count_tokens(prefill=5, decode=1)
        step.count_tokens(decode=2, drafted=3, accepted=1)
        step.add_host_ns(7)
    outcome = Outcome(lookups=4, hits=2, misses=2, fills=2, bytes=20, stall_ns=4)
    assert records == [StepRecord("paged", 1, False, 10, 7, 5, 3, 3, 1, outcome)]


def test_step_with_a_clock_that_steps_back_has_no_negative_duration() -> None:
    """Contract 1.5: a duration is never negative."""
    records: list[StepRecord] = []
    clock = StepClock(now_ns=iter([5, 3]).__next__, on_end=records.append)
    with clock.step("paged"):
        pass
    assert records[0].step_ns == 0


@pytest.mark.parametrize(
    "addition", [lambda step: step.add(Outcome()), lambda step: step.count_tokens(1), lambda step: step.add_host_ns(1)]
)
def test_adding_to_an_ended_step_is_refused(addition: object) -> None:
    """What arrives after the end cannot be counted, and is said rather than lost."""
    clock = StepClock()
    with clock.step("paged") as step:
        pass
    assert callable(addition)
    with pytest.raises(RuntimeError, match="paged step 1: it has ended"):
        addition(step)


def test_negative_additions_are_refused() -> None:
    """Counters only grow (contract 3.1), so a negative addition is the caller's mistake."""
    with StepClock().step("paged") as step:
        with pytest.raises(ValueError, match="at least 0"):
            step.count_tokens(decode=-1)
        with pytest.raises(ValueError, match="at least 0"):
            step.add_host_ns(-1)


def test_unknown_kind_is_refused_and_charges_nothing() -> None:
    """Contract 1.2: there are four kinds of forward."""
    clock = StepClock()
    with pytest.raises(ValueError, match="paged, draft, dense, replay"), clock.step("warm-up"):  # type: ignore[arg-type]
        pass
    assert clock.steps == 0


def test_calibration_is_guarded_and_is_no_step() -> None:
    """Contract 1.6: warm-up and capture are nest-guarded like any forward and never count as steps."""
    clock, records = clock_with_records()
    with clock.calibration() as scope:
        scope.add(Outcome(fills=3))
        with pytest.raises(NestedStepError, match="calibration step 1"), clock.step("paged"):
            pass
    with clock.step("paged"), pytest.raises(NestedStepError), clock.calibration():
        pass
    with pytest.raises(Halt), clock.calibration():
        raise Halt
    assert scope.outcome.fills == 3
    assert scope.duration_ns == 10
    assert (clock.calibrations, clock.steps, len(records)) == (2, 1, 1)


def test_end_that_cannot_be_told_leaves_the_step_ended() -> None:
    """If on_end raises, the step has ended; the error propagates, or is a note on the body's own."""

    def fail(record: StepRecord) -> None:
        raise OSError(f"no room for {record.index}")

    clock = StepClock(on_end=fail)
    with pytest.raises(OSError, match="no room for 1"), clock.step("paged"):
        pass
    with pytest.raises(ValueError, match="body") as caught, clock.step("paged"):
        raise ValueError("body")
    assert caught.value.__notes__ == ["The end of paged step 2 could not be told: OSError: no room for 2"]
    assert (clock.steps, clock.steps_failed) == (2, 1)


def test_clock_of_many_threads_counts_every_step() -> None:
    """A clock that threads share through a queue loses no step and issues each index once."""
    clock, indices, turn = StepClock(), list[int](), threading.Lock()

    def run() -> None:
        for _ in range(200):
            with turn, clock.step("paged") as step:
                indices.append(step.index)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (clock.steps, indices) == (800, list(range(1, 801)))


def test_reprs_show_the_state() -> None:
    """The repr of a clock and of a step is one line of state."""
    clock = StepClock(now_ns=ticking().__next__)
    with clock.step("draft") as step:
        shown: tuple[StepClock, Step] = (clock, step)
        assert [repr(each) for each in shown] == ["<StepClock 0 steps, 0 failed: draft 1 open>", "<Step draft 1: open>"]
    assert [repr(each) for each in shown] == [
        "<StepClock 1 steps, 0 failed: idle>",
        "<Step draft 1: ended after 10 ns>",
    ]


@pytest.mark.parametrize("error", [NestedStepError("paged", 4, "draft"), OverlappingStepError("dense", 1, "paged")])
def test_refusal_survives_pickling(error: RuntimeError) -> None:
    """An error that crosses a process keeps its fields and its message."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
