"""Exit codes of the command line, and the one line that says why a command failed."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from enum import IntEnum

from cyclopts import CycloptsError

from ...steps.log_stream import LogStream
from ..settings import SettingError, variable_name

__all__ = ["ExitCode", "UsageError", "exit_code_of", "report_failure"]


class ExitCode(IntEnum):
    """What a command returns to the shell; a signal is 128 + its number."""

    OK = 0
    FAILED = 1
    USAGE = 2
    BAD_MODEL = 3
    ENGINE_DIED = 4


class UsageError(Exception):
    """Raised when arguments that are each fine do not go together, or name a file that cannot be read."""


def exit_code_of(failure: BaseException) -> ExitCode:
    """Returns the exit code for what a command raised."""
    if isinstance(failure, (SettingError, UsageError, CycloptsError)):
        return ExitCode.USAGE
    # Only now: a usage error must not pay for these imports.
    from ...memory.budget import InsufficientHostMemoryError, InsufficientSlotsError
    from ...memory.errors import CheckpointError
    from ..errors import DeviceUnavailableError, EngineDeadError, PromptError

    refused = (InsufficientSlotsError, InsufficientHostMemoryError, DeviceUnavailableError, PromptError)
    if isinstance(failure, refused):
        return ExitCode.USAGE
    if isinstance(failure, CheckpointError):
        return ExitCode.BAD_MODEL
    return ExitCode.ENGINE_DIED if isinstance(failure, EngineDeadError) else ExitCode.FAILED


def report_failure(failure: BaseException) -> ExitCode:
    """Writes one line about `failure` to stderr, after its traceback with EXPERTSTREAM_LOG_LEVEL=debug.

    A reader of stdout that went away (`| head`) is no news to anybody: it is the exit code alone.
    """
    if isinstance(failure, BrokenPipeError):
        _abandon_stdout()
        return ExitCode.FAILED
    said = ""
    if os.environ.get(variable_name("log_level"), "").strip().lower() == "debug":
        said = "".join(traceback.format_exception(failure))
    text = " ".join(str(failure).split()) or type(failure).__name__
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # it is closed or full: the exit code still says what failed
            LogStream(sys.stderr).write(f"{said}expertstream: error: {text}\n")
    return exit_code_of(failure)


def _abandon_stdout() -> None:
    """Points stdout at nothing, so that the interpreter's own flush at exit does not fail again."""
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
