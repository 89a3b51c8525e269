"""Turns any value into one that JSON can hold, without ever raising and without waiting for a device."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from itertools import islice

__all__ = ["JsonValue", "jsonable"]

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

MAX_DEPTH = 16
MAX_ITEMS = 10_000
# `str(int)` raises above a limit of digits that a host may set as low as 640; hexadecimal has no limit.
_MAX_DECIMAL_BITS = 2_000


def jsonable(value: object) -> JsonValue:
    """Renders a value as JSON has it.

    NaN and infinities become null, bytes and enums text, NumPy and host tensors numbers or lists.
    A tensor on a device is named, never read.
    Keys become text.
    What cannot be rendered (a cycle, a depth above 16, a `__repr__` that raises) becomes text in angle brackets.

    Args:
        value: Anything.

    Returns:
        A value that `json.dumps(..., allow_nan=False)` accepts; text in it has no lone surrogates.
    """
    return _render(value, ())


def _render(value: object, above: tuple[int, ...]) -> JsonValue:
    try:
        return _plain(value, above)
    except Exception as error:  # a foreign object's own code: its failure is rendered, not raised
        return f"<{type(value).__name__}: {type(error).__name__} while rendering>"


def _plain(value: object, above: tuple[int, ...]) -> JsonValue:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return _enum(value)
    if isinstance(value, str):
        return _encodable(str.__str__(value))
    if isinstance(value, int):
        return _integer(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode("utf-8", "backslashreplace")
    if id(value) in above:
        return "<circular>"
    if len(above) >= MAX_DEPTH:
        return "<too deep>"
    return _compound(value, (*above, id(value)))


def _compound(value: object, above: tuple[int, ...]) -> JsonValue:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _mapping({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, above)
    if isinstance(value, Mapping):
        return _mapping(value, above)
    if isinstance(value, Set):
        return _items(sorted(value, key=_text), len(value), above)
    if isinstance(value, Sequence):
        return _items(value, len(value), above)
    if hasattr(value, "item") and hasattr(value, "shape"):
        return _array(value, above)
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return _text(value)


def _mapping(value: Mapping[object, object] | dict[str, object], above: tuple[int, ...]) -> dict[str, JsonValue]:
    rendered: dict[str, JsonValue] = {}
    for key, item in islice(value.items(), MAX_ITEMS):
        name = unique = _key(key)
        count = 1
        while unique in rendered:  # 1 and "1" are one name in JSON: neither may hide the other
            count += 1
            unique = f"{name} ({count})"
        rendered[unique] = _render(item, above)
    if len(value) > MAX_ITEMS:
        rendered["…"] = f"<{len(value) - MAX_ITEMS} more>"
    return rendered


def _items(value: Iterable[object], length: int, above: tuple[int, ...]) -> list[JsonValue]:
    rendered = [_render(item, above) for item in islice(value, MAX_ITEMS)]
    return [*rendered, f"<{length - MAX_ITEMS} more>"] if length > MAX_ITEMS else rendered


def _array(value: object, above: tuple[int, ...]) -> JsonValue:
    """Renders what NumPy, torch and CuPy call an array; only memory of the host is read."""
    shape = tuple(getattr(value, "shape", ()))
    device = getattr(value, "device", "cpu")
    name = type(value).__name__
    if getattr(device, "type", device) != "cpu":
        return _encodable(f"<{name} {list(shape)} on {device}>")
    if math.prod(shape) > MAX_ITEMS:
        return f"<{name} {list(shape)}>"
    return _render(getattr(value, "tolist" if shape else "item")(), above)


def _enum(value: Enum) -> JsonValue:
    if isinstance(value.value, str):
        return _encodable(str.__str__(value.value))
    return int(value) if isinstance(value, int) else value.name


def _key(key: object) -> str:
    if isinstance(key, Enum):
        return _encodable(str.__str__(key.value) if isinstance(key.value, str) else key.name)
    if isinstance(key, (tuple, frozenset)):
        return ",".join(_key(part) for part in key)
    rendered = _render(key, ())
    if rendered is None or isinstance(rendered, bool):
        return {None: "null", True: "true", False: "false"}[rendered]
    return str(rendered)


def _integer(value: int) -> int | str:
    return value if value.bit_length() <= _MAX_DECIMAL_BITS else hex(value)


def _text(value: object) -> str:
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        return _encodable(path if isinstance(path, str) else os.fsdecode(path))
    if isinstance(value, BaseException):
        said = _encodable(str(value))
        return f"{type(value).__name__}: {said}" if said else type(value).__name__
    if isinstance(value, type) or callable(value):
        return _encodable(getattr(value, "__qualname__", type(value).__qualname__))
    # The inherited repr holds an address, which means nothing in a log and differs in every run.
    if type(value).__str__ is object.__str__ and type(value).__repr__ is object.__repr__:
        return f"<{type(value).__qualname__}>"
    return _encodable(str(value))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
