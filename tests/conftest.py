"""Fixtures of every test: both event loops, a clean environment, and a guard against a blocked loop."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest
from environment import PREFIX, changed_variables

# Far above what a callback may take, so that a busy machine fails no test and a blocking call still does.
_BLOCKED_S = 0.5
_LOOPS = ["asyncio", "uvloop"] if importlib.util.find_spec("uvloop") else ["asyncio"]


@pytest.fixture(params=_LOOPS)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Runs a test marked `anyio` on asyncio's own loop, and on uvloop where there is one."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Hides the EXPERTSTREAM_* variables of whoever runs the tests."""
    with changed_variables({name: "" for name in os.environ if name.startswith(PREFIX)}):
        yield


@pytest.fixture
def loop_guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test whose event loop was blocked by one callback; it sees asyncio's own loop only."""
    slowest: list[tuple[float, str]] = [(0.0, "")]
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begin_s = perf_counter()
        run(handle)
        slowest[0] = max(slowest[0], (perf_counter() - begin_s, repr(handle)))

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    yield
    seconds, handle = slowest[0]
    if seconds > _BLOCKED_S:
        pytest.fail(f"the event loop was blocked for {seconds:.2f} s by {handle}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is none; torch is only imported if there are any."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
