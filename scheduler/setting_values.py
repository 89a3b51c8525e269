"""The values that settings take: what each form of text means, and the error for text that means nothing.

A `ValueKind` turns whatever a call, a flag, a variable or a file gave into one typed value. It raises
`ValueError` where the accepted forms say enough, and `Refused` with a reason where they do not;
`settings.resolve` adds the setting's name and where the value came from.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from ..memory.policy import policy_names
from .budgets import HostBudget, SlotBudget

__all__ = [
    "HostBudget",
    "Refused",
    "SettingError",
    "SlotBudget",
    "ValueKind",
    "boolean",
    "choice",
    "device",
    "host_budget",
    "integer",
    "is_blank",
    "length_or_auto",
    "log_path",
    "not_available",
    "policy_name",
    "seconds",
    "size",
    "slot_budget",
]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_NO_FILE = frozenset({"none"}) | _FALSE
_MAX_COUNT = 2**63 - 1
_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = r"[+-]?[0-9]+(?:\.[0-9]+)?"
_SIZE = re.compile(rf"({_DECIMAL})\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_PERCENT = re.compile(rf"({_DECIMAL})\s*%")
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZES = "a size such as 8G, 8GB (10^9 bytes) or 8GiB (2^30 bytes)"


class Refused(ValueError):
    """Raised by a parser when a value has an accepted form and still cannot be used; the message says why."""


class SettingError(ValueError):
    """Raised when a setting is unknown, or has a value that cannot be used.

    Attributes:
        setting: Name of the setting, or of what stood in its place.
        value: The value as it was given.
        source: Where it was given: "argument", "environment NAME" or "file PATH".
    """

    def __init__(self, setting: str, value: object, source: str, problem: str) -> None:
        super().__init__(f"setting {setting}: {problem} (from {source})")
        self.setting = setting
        self.value = value
        self.source = source


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The accepted forms of a setting, in words, and the function that reads them.

    Attributes:
        forms: What is accepted, as an error message and the docs show it.
        parse: Returns the typed value, or raises `ValueError`.
        is_switch: Whether a command-line flag of this kind needs no value.
    """

    forms: str
    parse: Callable[[object], object]
    is_switch: bool = False


def is_blank(value: object) -> bool:
    """Whether a value counts as not given: None, or text without a visible character."""
    return value is None or (isinstance(value, str) and not value.strip())


def _text(value: object) -> str:
    """Returns the text of a string or a whole number; a bool or a float is neither."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError


def _integer(value: object) -> int:
    text = _text(value)
    if not _INTEGER.fullmatch(text):
        raise ValueError
    return _bounded(int(text))


def _size_bytes(value: object) -> int:
    match = _SIZE.fullmatch(_text(value))
    if match is None or (match[3] and not match[2]):  # "8iB" has no prefix that the i could belong to
        raise ValueError
    # A fraction of a size is exact ("1.5GiB"); a fraction of a byte is rounded down, as every budget is a ceiling.
    unit: int = (1024 if match[3] else 1000) ** _POWERS[match[2].lower()]
    number = Fraction(match[1]) * unit
    if not (match[2] or number.denominator == 1):
        raise ValueError
    return _bounded(math.floor(number))


def _bounded(number: int) -> int:
    """Returns a number that a machine can count to; Python would not even print one of some thousand digits."""
    if abs(number) > _MAX_COUNT:
        raise Refused(f"it is more than {_MAX_COUNT}")
    return number


def _share(text: str) -> float | None:
    match = _PERCENT.fullmatch(text)
    if match is None:
        return None
    share = float(match[1]) / 100
    if share > 1:
        raise Refused("a share is at most 100%")
    return share


def _slot_budget(value: object) -> SlotBudget:
    if isinstance(value, SlotBudget):
        return value
    text = _text(value)
    if text.lower() == "auto":
        return SlotBudget()
    if _INTEGER.fullmatch(text):
        return SlotBudget("per_layer", int(text))
    share = _share(text)
    return SlotBudget("bytes", _size_bytes(text)) if share is None else SlotBudget("share", share)


def _host_budget(value: object) -> HostBudget:
    if isinstance(value, HostBudget):
        return value
    text = _text(value)
    if text.lower() == "auto":
        return HostBudget()
    share = _share(text)
    budget = HostBudget("bytes", _size_bytes(text)) if share is None else HostBudget("share", share)
    if budget.amount < 0:
        raise Refused("it cannot be negative")
    return budget


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = _text(value).lower()
    if text not in _TRUE | _FALSE:
        raise ValueError
    return text in _TRUE


def _seconds(value: object) -> float:
    text = str(value) if isinstance(value, float) else _text(value)
    number = float(text)  # raises ValueError itself
    if not (math.isfinite(number) and number >= 0):
        raise ValueError
    return number


def _log_path(value: object) -> Path | None:
    if isinstance(value, os.PathLike):
        return Path(value)
    text = "0" if value is False else _text(value)
    if text.lower() in _NO_FILE:
        return None
    if not isinstance(value, str):
        raise ValueError
    return Path(text)


def _length_or_auto(value: object) -> int | Literal["auto"]:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    number = _integer(value)
    if number < 1:
        raise ValueError
    return number


def _device(value: object) -> str:
    text = _text(value).lower()
    if not _DEVICE.fullmatch(text):
        raise ValueError
    return text


boolean = ValueKind("1, true, yes or on; 0, false, no or off", _boolean, is_switch=True)
size = ValueKind(f"{_SIZES}, or a plain byte count", _size_bytes)
slot_budget = ValueKind(f"auto, a whole number of slots per MoE layer, {_SIZES}, or 50%", _slot_budget)
host_budget = ValueKind(f"auto, {_SIZES}, a plain byte count, or 50%", _host_budget)
seconds = ValueKind("a number of seconds, 0 or more", _seconds)
log_path = ValueKind("a path, or none for no file (a file called none is ./none)", _log_path)
length_or_auto = ValueKind("auto, or a whole number of 1 or more", _length_or_auto)
device = ValueKind("auto, cpu, cuda or cuda:N", _device)


def integer(low: int, high: int | None = None) -> ValueKind:
    """Returns the kind of a whole number between `low` and `high`, both included; `high` None is no upper bound."""

    def parse(value: object) -> int:
        number = _integer(value)
        if number < low or (high is not None and number > high):
            raise ValueError
        return number

    bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
    return ValueKind(f"a whole number {bounds}", parse)


def choice(*words: str) -> ValueKind:
    """Returns the kind of one word out of `words`, in any case."""

    def parse(value: object) -> str:
        word = _text(value).lower()
        if word not in words:
            raise ValueError
        return word

    return ValueKind(", ".join(words[:-1]) + f" or {words[-1]}", parse)


def _policy(value: object) -> str:
    name = _text(value)
    known = {known.lower(): known for known in policy_names()} | {known: known for known in policy_names()}
    if (found := known.get(name) or known.get(name.lower())) is None:
        raise ValueError
    return found


policy_name = ValueKind("lru, lrfu or the name of a registered policy", _policy)


def not_available(kind: ValueKind, is_available: Callable[[object], bool], forms: str, reason: str) -> ValueKind:
    """Returns `kind` without the values that this version cannot honour: those are refused with `reason`.

    Args:
        kind: What reads the value.
        is_available: Whether a value that `kind` read can be honoured.
        forms: What is left of the accepted forms.
        reason: Why a value that `kind` read is refused.
    """

    def parse(value: object) -> object:
        parsed = kind.parse(value)
        if not is_available(parsed):
            raise Refused(reason)
        return parsed

    return ValueKind(forms, parse, kind.is_switch)
