"""Exit codes, and the one line about a failure."""

from __future__ import annotations

import io

import pytest
from fake_engine import FakeEngine, failing

from expertstream.scheduler.cli import main


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        ("expertstream.memory.errors", "CheckpointError", 3),
        ("expertstream.memory.errors", "HeaderError", 3),
        ("expertstream.memory.budget", "InsufficientSlotsError", 2),
        ("expertstream.memory.budget", "InsufficientHostMemoryError", 2),
        ("expertstream", "DeviceUnavailableError", 2),
        ("expertstream", "PromptError", 2),
        ("expertstream", "EngineDeadError", 4),
        ("builtins", "RuntimeError", 1),
    ],
)
def test_failure_of_each_class_has_its_exit_code_and_one_line(
    module: str,
    name: str,
    code: int,
    debug: bool,
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each class of failure has its exit code and one line; a traceback only with EXPERTSTREAM_LOG_LEVEL=debug."""
    if debug:
        monkeypatch.setenv("EXPERTSTREAM_LOG_LEVEL", "debug")
    base: type[Exception] = getattr(__import__(module, fromlist=[name]), name)
    # The classes differ in what they are made of; the exit code must not depend on it.
    error = type("Told", (base,), {"__init__": lambda self: None, "__str__": lambda self: "two\n lines"})()
    engine.then = failing(error)
    assert main(["generate", "model", "--prompt", "a"]) == code
    assert engine.closed == 1
    err = capsys.readouterr().err
    assert err.endswith("expertstream: error: two lines\n")
    assert ("Traceback" in err) == debug
    assert debug or err.count("\n") == 1


def test_failure_that_stderr_does_not_take_still_has_its_exit_code(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stderr that is closed, full or absent loses the line, not the exit code."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    closed = io.StringIO()
    closed.close()
    for stream in (Full(), closed, None):
        monkeypatch.setattr("sys.stderr", stream)
        assert main(["config", "--slots", "5x"]) == 2
