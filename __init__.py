"""Runs Mixture-of-Experts language models whose experts do not fit on the device.

The names below are resolved when they are first used, so that importing the package imports neither torch
nor transformers nor CuPy, and starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertstream.memory.budget import InsufficientHostMemoryError, InsufficientSlotsError
    from expertstream.memory.errors import CheckpointError
    from expertstream.memory.kv_pages import KVFullError
    from expertstream.memory.policy import register_policy
    from expertstream.memory.replay import replay
    from expertstream.scheduler.engine import Engine, open
    from expertstream.scheduler.errors import (
        DeviceUnavailableError,
        EngineClosedError,
        EngineDeadError,
        PromptError,
        RequestTooLongError,
        WrongLoopError,
    )
    from expertstream.scheduler.loading import NotDeterministicError
    from expertstream.scheduler.requests import Token
    from expertstream.scheduler.settings import SettingError, Settings
    from expertstream.steps.clock import NestedStepError, StepClock
    from expertstream.steps.model.text import NoTokenizerError
    from expertstream.steps.process import flush_statistics
    from expertstream.steps.statistics import Statistics

__all__ = [
    "CheckpointError",
    "DeviceUnavailableError",
    "Engine",
    "EngineClosedError",
    "EngineDeadError",
    "InsufficientHostMemoryError",
    "InsufficientSlotsError",
    "KVFullError",
    "NestedStepError",
    "NoTokenizerError",
    "NotDeterministicError",
    "PromptError",
    "RequestTooLongError",
    "SettingError",
    "Settings",
    "Statistics",
    "StepClock",
    "Token",
    "WrongLoopError",
    "__version__",
    "flush_statistics",
    "open",
    "register_policy",
    "replay",
]

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "expertstream.memory.errors",
    "DeviceUnavailableError": "expertstream.scheduler.errors",
    "Engine": "expertstream.scheduler.engine",
    "EngineClosedError": "expertstream.scheduler.errors",
    "EngineDeadError": "expertstream.scheduler.errors",
    "InsufficientHostMemoryError": "expertstream.memory.budget",
    "InsufficientSlotsError": "expertstream.memory.budget",
    "KVFullError": "expertstream.memory.kv_pages",
    "NestedStepError": "expertstream.steps.clock",
    "NoTokenizerError": "expertstream.steps.model.text",
    "NotDeterministicError": "expertstream.scheduler.loading",
    "PromptError": "expertstream.scheduler.errors",
    "RequestTooLongError": "expertstream.scheduler.errors",
    "SettingError": "expertstream.scheduler.settings",
    "Settings": "expertstream.scheduler.settings",
    "Statistics": "expertstream.steps.statistics",
    "StepClock": "expertstream.steps.clock",
    "Token": "expertstream.scheduler.requests",
    "WrongLoopError": "expertstream.scheduler.errors",
    "flush_statistics": "expertstream.steps.process",
    "open": "expertstream.scheduler.engine",
    "register_policy": "expertstream.memory.policy",
    "replay": "expertstream.memory.replay",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
