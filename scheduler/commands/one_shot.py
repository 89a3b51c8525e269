"""Runs a command that does one thing and ends: an event loop of its own, stopped by Ctrl-C and SIGTERM.

The library installs no signal handlers and chooses no event loop; a command is the process, so it does both.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio

__all__ = ["handled_signals", "run_one_shot"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_one_shot(work: Callable[[], Awaitable[int]]) -> int:
    """Runs `work` to its end, on uvloop where that can be imported.

    Returns:
        What `work` returned, or 128 + the signal's number where a signal stopped it. `work` is then
        cancelled once and closes what it has open before this returns.
    """
    return anyio.run(_until_signal, work, backend="asyncio", backend_options={"use_uvloop": _has_uvloop()})


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except Exception:  # not made for this platform, not installed, or broken: asyncio's own loop serves
        return False
    return True


async def _until_signal(work: Callable[[], Awaitable[int]]) -> int:
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def stop(number: int) -> None:
        # A second signal must not interrupt the closing that the first one began.
        if not received:
            task.cancel()
        received.append(number)

    with handled_signals(stop):
        try:
            code = await work()
        except asyncio.CancelledError:
            if not received:
                raise
            task.uncancel()
    return 128 + received[0] if received else code


@contextmanager
def handled_signals(stop: Callable[[int], None]) -> Iterator[None]:
    """Calls `stop` with its number, on the running loop, when SIGINT or SIGTERM arrives.

    Outside the main thread, where Python allows no handlers, it changes nothing. The handlers that were there
    before are put back at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    removers = [_install(loop, number, stop) for number in _SIGNALS]
    try:
        yield
    finally:
        for remove in removers:
            remove()
        for number, handler in before.items():
            if handler is not None:  # None: installed by code that is not Python, which cannot be put back
                signal.signal(number, handler)


def _install(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, stop: Callable[[int], None]
) -> Callable[[], object]:
    try:
        loop.add_signal_handler(number, stop, int(number))
    except NotImplementedError:  # Windows: its loops have the method and refuse
        signal.signal(number, lambda received, frame: loop.call_soon_threadsafe(stop, received))
        return lambda: None
    return lambda: loop.remove_signal_handler(number)
