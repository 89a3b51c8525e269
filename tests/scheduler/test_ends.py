"""How a process ends with a real engine in it: one final record, the right exit code, nothing else said."""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_script
from large import write_zeros
from tiny import TINY

SCRIPT = """
import asyncio, sys
import structlog
import expertstream

structlog.configure(processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.ReturnLoggerFactory())
how, model = sys.argv[2], sys.argv[3]

async def use(engine):
    async for token in engine.generate("import ", max_tokens=1000):
        if token.index == 3:
            if how == "sys.exit":
                sys.exit(7)
            if how == "exception":
                raise RuntimeError("planted")
            return

async def main():
    engine = await expertstream.open(model, slots="50%", stats_every=0, log_file=sys.argv[1])
    if how == "in the middle of a step":
        task = asyncio.ensure_future(use(engine))
        while engine.statistics().steps < 2:
            await asyncio.sleep(0)
        return  # asyncio.run cancels what is left, the step in progress included
    await use(engine)
    if how == "flushed":
        assert expertstream.flush_statistics(by="the host")
        assert not expertstream.flush_statistics(by="the host")
        await use(engine)
        await engine.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [("never closed", 0), ("in the middle of a step", 0), ("sys.exit", 7), ("exception", 1), ("flushed", 0)],
)
def test_process_with_an_engine_ends_with_one_final_record(tmp_path: Path, how: str, code: int) -> None:
    """Contract 4.4: exactly one final record however a host application ends; closing is not needed for it."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error"}  # its warnings are not ours
    child = run_script(tmp_path, SCRIPT, how, str(TINY), changes=quiet, timeout_s=100)
    assert child.rc == code, child.stderr
    finals = child.named("process.final")
    assert len(finals) == 1
    assert finals[0]["flushed_by"] == ("the host" if how == "flushed" else None)
    assert finals[0]["totals"]["steps"] >= 2
    if how == "flushed":
        (closed,) = child.named("store.closed")
        assert closed["statistics"]["steps"] > finals[0]["totals"]["steps"]
    else:
        assert child.entries[-1]["event"] == "process.final"
    if how != "exception":
        assert child.stderr == ""


READING = """
import asyncio, sys
import expertstream

async def main():
    engine = await expertstream.open(sys.argv[2], slots="25%", log_file=sys.argv[1], log_level="error")
    assert not engine._opened.loaded.arena.is_complete, "too late: everything is read"
    if sys.argv[3] == "sys.exit":
        sys.exit(5)

asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("sys.exit", 5)])
def test_process_that_ends_while_experts_are_being_read_ends_in_order(tmp_path: Path, how: str, code: int) -> None:
    """Contract 4.4: threads in native code are out of it before the interpreter goes: no abort, one final record."""
    model = write_zeros(tmp_path / "model")
    (tmp_path / "run").mkdir()
    quiet = {"TRANSFORMERS_VERBOSITY": "error"}
    child = run_script(tmp_path / "run", READING, str(model), how, changes=quiet, timeout_s=100)
    assert child.rc == code, child.stderr
    assert "terminate" not in child.stderr
    assert len(child.named("process.final")) == 1
