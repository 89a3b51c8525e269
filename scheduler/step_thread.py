"""The one thread per engine on which model code runs; the loop only hands it functions and awaits them."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio

__all__ = ["StepThread", "wait_undisturbed"]

T = TypeVar("T")
_Job = Callable[[], None]


class StepThread:
    """Runs functions one after another on a thread of its own.

    The thread is daemonic: a program that never closes its engine can still end, whatever is running here.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a function; it runs in a copy of the caller's context.

        Returns:
            A future of the running loop. Cancelling it does not stop the function.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            try:
                result = context.run(function)
            except BaseException as exc:  # every outcome belongs to whoever awaits the future
                deliver(_fail, _carriable(exc))
            else:
                deliver(_finish, result)

        def deliver(settle: Callable[[asyncio.Future[T], object], None], value: object) -> None:
            with suppress(RuntimeError):  # the loop was closed under a running step: nobody is left to tell
                loop.call_soon_threadsafe(settle, future, value)

        self._jobs.put(job)
        return future

    def close(self) -> None:
        """End the thread after what was queued. Waits for it up to ten seconds: call it when the queue has run dry."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10.0)

    @property
    def ident(self) -> int | None:
        """The thread's identifier."""
        return self._thread.ident

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def __repr__(self) -> str:
        return f"<StepThread {self._thread.name} {'alive' if self._thread.is_alive() else 'ended'}>"


async def wait_undisturbed(future: asyncio.Future[T]) -> None:
    """Wait until a future is done, however often the waiting task is cancelled meanwhile.

    Raises:
        CancelledError: After the future is done, when the task was cancelled before.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # which holds off anyio's cancelling; asyncio's own comes through
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as exc:
                cancelled = exc
    if cancelled is not None:
        raise cancelled


def _carriable(error: BaseException) -> BaseException:
    """Return an error as a future can carry it to its waiter.

    A `StopIteration` it refuses, so the waiter would wait for ever; and what is no `Exception` would mean something to
    the loop that the function did not mean, as a `CancelledError` means that the waiter was cancelled.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    carried = RuntimeError(f"{type(error).__name__} was raised on the step thread: {error}")
    carried.__cause__ = error
    return carried


def _finish(future: asyncio.Future[T], value: object) -> None:
    if not future.done():
        future.set_result(value)  # type: ignore[arg-type]


def _fail(future: asyncio.Future[T], error: object) -> None:
    if not future.done():
        future.set_exception(error)  # type: ignore[arg-type]
