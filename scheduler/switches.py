"""Switches of the test suite: variables that are no settings, have no flag, and warn when they are on."""

from __future__ import annotations

import math
import os

from .setting_values import SettingError

__all__ = ["throttle_bytes_per_s"]

_THROTTLE = "EXPERTSTREAM_TEST_THROTTLE_COPY"


def throttle_bytes_per_s() -> float:
    """Return the rate that copies are slowed to; 0 is off.

    Raises:
        SettingError: When the variable is no finite number of at least 0.
    """
    given = os.environ.get(_THROTTLE) or "0"
    try:
        rate = float(given)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        problem = f"cannot use {given!r}; accepted: a finite number of bytes per second of at least 0"
        raise SettingError("test_throttle_copy", given, f"environment {_THROTTLE}", problem)
    return rate
