"""Runs one forward as a step task: opens the step on the clock, computes on the step thread, ends the step once."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..steps.clock import Step, StepClock, StepKind
from .step_thread import StepThread, wait_undisturbed

if TYPE_CHECKING:  # it imports torch
    from ..memory.store import ExpertStore

__all__ = ["StepRunner"]

T = TypeVar("T")


class StepRunner:
    """The only way a forward is started.

    A step task belongs to the scheduler: whoever awaits it may be cancelled, the step is not.

    Args:
        clock: Counts steps; refuses nests.
        thread: Computes.
        store: Its outcome since the last step is charged to the step.
        stop: Ends the forward in progress at its next look-up; called when the loop itself is shut down under a step.
    """

    def __init__(self, clock: StepClock, thread: StepThread, store: ExpertStore, stop: Callable[[], None]) -> None:
        self._clock, self._thread, self._store, self._stop = clock, thread, store, stop

    async def run(self, kind: StepKind, context: contextvars.Context, function: Callable[[Step], T]) -> T:
        """Run one forward as one step.

        Args:
            kind: The step's kind.
            context: The flow that asked for it; a step that is open there refuses this one.
            function: Computes on the step thread, given the open step to count tokens in.

        Raises:
            NestedStepError: When a step is open in `context`; nothing was computed or charged.
        """
        task = asyncio.get_running_loop().create_task(self._step(kind, function), context=context.copy())
        return await asyncio.shield(task)

    async def _step(self, kind: StepKind, function: Callable[[Step], T]) -> T:
        with self._clock.step(kind) as step:
            opened = time.perf_counter_ns()
            spent = 0

            def timed() -> T:
                nonlocal spent
                started = time.perf_counter_ns()
                try:
                    return function(step)
                finally:
                    step.add(self._store.take_outcome())
                    spent = time.perf_counter_ns() - started

            computing = self._thread.submit(timed)
            try:
                return await asyncio.shield(computing)
            except asyncio.CancelledError:
                # Only a loop that shuts down cancels this task. The step ends when its thread is out of the forward.
                self._stop()
                try:
                    await wait_undisturbed(computing)
                finally:
                    computing.exception()  # seen: what the stopped forward raised is not news to anybody
                raise
            finally:
                # What of the step's wall was not computing: handing over, waking up, deciding on the loop.
                step.add_host_ns(max(0, time.perf_counter_ns() - opened - spent))
                if kind == "paged":
                    self._store.age += 1
