"""The scheduler: takes requests in the order they came and runs each forward they need as a step."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from ..steps.clock import StepRecord
from ..steps.sink import LogSink
from .errors import EngineClosedError, EngineDeadError
from .generation import Generation
from .requests import Request, SingleForward
from .step_runner import StepRunner

if TYPE_CHECKING:  # it imports torch
    from .loading import Loaded

__all__ = ["Scheduler"]

WIDE_SHARE = 0.8
"""Above this share of a layer's experts in one decode step, expert caching has little left to save."""


class Scheduler:
    """One request at a time, first come, first served.

    Args:
        loaded: The engine's model and pools.
        steps: Runs forwards.
        sink: Warnings go there.
        prefill_chunk: Tokens of a prefill step.
        num_drafts: Drafts per iteration.
    """

    def __init__(
        self, loaded: Loaded, steps: StepRunner, sink: LogSink, *, prefill_chunk: int, num_drafts: int
    ) -> None:
        self._loaded, self._steps, self._sink = loaded, steps, sink
        self._prefill_chunk, self._num_drafts = prefill_chunk, num_drafts
        self._waiting: deque[Request | SingleForward] = deque()
        self._running: Request | SingleForward | None = None
        self._changed = asyncio.Event()
        self._is_closing = False
        self._death: BaseException | None = None
        self._warned: set[str] = set()

    @property
    def is_closing(self) -> bool:
        """Whether no more work is taken."""
        return self._is_closing

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests being computed: 0 or 1."""
        return int(self._running is not None)

    def submit(self, work: Request | SingleForward) -> None:
        """Queue work.

        Raises:
            EngineClosedError: When the engine is closing.
            EngineDeadError: When the scheduler has failed.
        """
        if self._death is not None:
            raise EngineDeadError() from self._death
        if self._is_closing:
            raise EngineClosedError()
        self._waiting.append(work)
        self._changed.set()

    def close(self) -> None:
        """Take no more work; `run` ends after the step in progress. Idempotent."""
        self._is_closing = True
        self._changed.set()
        if self._running is not None:
            _cut_short(self._running)

    async def run(self) -> None:
        """Serve until closed. Whatever ends this ends every request with an error of its own."""
        try:
            while not self._is_closing:
                if not self._waiting:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                self._running = self._waiting.popleft()
                await self._serve(self._running)
                self._running = None
        except BaseException as exc:
            self._death = exc
            raise
        finally:
            self._end_all()

    def step_ended(self, record: StepRecord) -> None:
        """Say once, with a stable code, what a step showed about the budget."""
        if record.kind != "paged" or not record.tokens_decode:
            return
        store = self._loaded.store
        if record.outcome.waves or store.is_overfull:
            text = "A decode step wanted more experts of a layer than it has slots; more slots would be faster."
            self._warn("slots.below_working_set", text, step=record.index, waves=record.outcome.waves)
        widest = store.widest_share
        if widest > WIDE_SHARE:
            text = "A decode step wanted most experts of a layer; a cache of experts saves little there."
            self._warn("residency.batch_is_wide", text, step=record.index, share=round(widest, 3))

    def _warn(self, code: str, message: str, **figures: object) -> None:
        if code not in self._warned:
            self._warned.add(code)
            self._sink.entry("warning", "warning", code=code, message=message, **figures)

    async def _serve(self, work: Request | SingleForward) -> None:
        if work.is_cancelled:
            _settle(work, None)
            return
        try:
            if isinstance(work, Request):
                await self._generate(work)
            else:
                result = await self._steps.run(work.kind, work.context, work.function)
                if not work.result.done():
                    work.result.set_result(result)
        except Exception as exc:  # one request's error: the engine goes on with the next
            _settle(work, _closed_by(exc) if self.is_closing else exc)
        else:
            # A request that closing cut short did not reach its end: its caller must not take it for one.
            _settle(work, EngineClosedError() if work.is_cut_short else None)

    async def _generate(self, request: Request) -> None:
        generation = Generation(
            request, self._loaded, self._steps, prefill_chunk=self._prefill_chunk, num_drafts=self._num_drafts
        )
        try:
            await generation.run()
        finally:
            generation.release()

    def _end_all(self) -> None:
        for work in (self._running, *self._waiting):
            if work is not None:
                error: Exception = EngineClosedError()
                if self._death is not None:
                    error = EngineDeadError()
                    error.__cause__ = self._death
                _settle(work, error)
        self._running = None
        self._waiting.clear()


def _closed_by(error: Exception) -> EngineClosedError:
    """Return what a request is told whose step failed while the engine was closing; the step's error is its cause."""
    closed = EngineClosedError()
    closed.__cause__ = error
    return closed


def _cut_short(work: Request | SingleForward) -> None:
    if isinstance(work, Request):
        work.is_cancelled = work.is_cut_short = True


def _settle(work: Request | SingleForward, error: BaseException | None) -> None:
    if isinstance(work, Request):
        work.channel.end(error)
    elif error is not None and not work.result.done():
        work.result.set_exception(error)
