"""What opening does when it fails, is cancelled or is handed a callback that raises: nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PROMPT, TINY, greedy, quiet

import expertstream
from expertstream.memory.budget import InsufficientHostMemoryError
from expertstream.memory.errors import CheckpointError
from expertstream.scheduler import opening

pytestmark = pytest.mark.anyio
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Opening is the same under any loop; one is enough."""
    backend: str = request.param
    return backend


def entries_of(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def copy_of_tiny(folder: Path, **changes: dict[str, object]) -> Path:
    """Copy the shipped checkpoint with values of its JSON files changed, by file."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    for name, values in changes.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **values}), "utf-8")
    return folder


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("expertstream")]


@pytest.mark.parametrize("value", ["</s>", [None], True, 1.5, {}])
async def test_end_token_that_is_no_id_is_refused_and_leaves_no_thread(value: object, tmp_path: Path) -> None:
    """A wrong eos_token_id is a CheckpointError with its file; nothing that opening started is left behind."""
    path = copy_of_tiny(tmp_path / "model", generation_config={"eos_token_id": value})
    before = our_threads()
    with pytest.raises(CheckpointError, match=r"generation_config\.json: its eos_token_id is"):
        await expertstream.open(path, **quiet())
    assert our_threads() == before


async def test_failure_after_loading_closes_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening that fails at its last part leaves no thread behind either."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(opening, "_facts", fail)
    before = our_threads()
    with pytest.raises(RuntimeError, match="planted"):
        await expertstream.open(TINY, **quiet())
    assert our_threads() == before


@pytest.mark.parametrize("value", [0, -1])
async def test_length_that_no_request_fits_is_refused(value: int, tmp_path: Path) -> None:
    """A config without room for a token is refused when it is read, not by each request."""
    path = copy_of_tiny(tmp_path / "model", config={"max_position_embeddings": value})
    with pytest.raises(CheckpointError, match=f"its max_position_embeddings is {value}"):
        await expertstream.open(path, **quiet())


@needs_no_gpu
async def test_length_whose_pages_no_memory_holds_is_refused_before_they_are_made() -> None:
    """Contract 2.3: a max_model_len that was asked for and cannot be had is refused with both sizes."""
    with pytest.raises(InsufficientHostMemoryError, match=r"max_model_len: the KV pages of \d+ tokens take \d+ bytes"):
        await expertstream.open(TINY, **quiet(max_model_len=10**15))


async def test_progress_that_raises_is_called_no_more_and_hurts_nobody() -> None:
    """The caller's progress callback runs on reader threads: what it raises is on the log, and records are read on."""
    calls: list[int] = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        raise ValueError("planted")

    arguments = quiet(slots=4, host_memory="30%", reader_threads=1)
    async with expertstream.open(TINY, progress=fail, **arguments) as engine:
        async with asyncio.timeout(20):
            assert [token.id async for token in engine.generate(PROMPT, max_tokens=3)] == greedy()[:3]
    (said,) = [entry for entry in entries_of(arguments["log_stream"]) if entry.get("code") == "progress.failed"]
    assert said["message"].endswith("ValueError: planted")
    assert len(calls) == 1


async def test_opening_cancelled_twice_waits_for_what_it_started() -> None:
    """A burst of cancellations leaves no thread and no error that nobody sees."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    before = our_threads()
    task = asyncio.ensure_future(_enter(expertstream.open(TINY, **quiet())))
    await asyncio.sleep(0)
    while our_threads() == before:
        await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()
    assert our_threads() == before
    assert complaints == []


async def _enter(opening: Any) -> None:
    async with opening:
        pass


async def test_opening_entered_twice_is_refused() -> None:
    """One opening is one engine: a second one would have nobody to close it."""
    once = expertstream.open(TINY, **quiet())
    async with once:
        with pytest.raises(RuntimeError, match="entered already"):
            await once.__aenter__()
