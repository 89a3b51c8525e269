"""Runs Mixture-of-Experts language models whose experts do not fit on the device.

The names below are resolved when they are first used, so that importing the package imports neither torch
nor transformers nor CuPy, and starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertstream.memory.budget import InsufficientSlotsError
    from expertstream.memory.errors import CheckpointError
    from expertstream.scheduler.engine import Engine, open
    from expertstream.scheduler.errors import EngineClosedError, EngineDeadError
    from expertstream.scheduler.requests import Token
    from expertstream.scheduler.settings import SettingError, Settings
    from expertstream.steps.clock import NestedStepError, StepClock
    from expertstream.steps.process import flush_statistics

__all__ = [
    "CheckpointError",
    "Engine",
    "EngineClosedError",
    "EngineDeadError",
    "InsufficientSlotsError",
    "NestedStepError",
    "SettingError",
    "Settings",
    "StepClock",
    "Token",
    "__version__",
    "flush_statistics",
    "open",
]

__version__ = "0.1.0"

_HOMES = {
    "CheckpointError": "expertstream.memory.errors",
    "Engine": "expertstream.scheduler.engine",
    "EngineClosedError": "expertstream.scheduler.errors",
    "EngineDeadError": "expertstream.scheduler.errors",
    "InsufficientSlotsError": "expertstream.memory.budget",
    "NestedStepError": "expertstream.steps.clock",
    "SettingError": "expertstream.scheduler.settings",
    "Settings": "expertstream.scheduler.settings",
    "StepClock": "expertstream.steps.clock",
    "Token": "expertstream.scheduler.requests",
    "flush_statistics": "expertstream.steps.process",
    "open": "expertstream.scheduler.engine",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
