"""The bar that shows how much of a model has been read, where a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["loading_bar"]


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None] | None]:
    """Yields a callback for `(done_bytes, total_bytes)` that draws on stderr, or None where stderr is no terminal.

    The callback may be called from any thread, and after the bar has gone, when it draws nothing.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("reading experts"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done_bytes, total_bytes: progress.update(task, completed=done_bytes, total=total_bytes)
