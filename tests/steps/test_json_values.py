"""Values on the log: whatever is handed in, JSON comes out, and no device is waited for."""

from __future__ import annotations

import datetime
import http
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest
from children import parse_line
from hypothesis import given
from hypothesis import strategies as st

from expertstream.steps.json_values import MAX_ITEMS, jsonable
from expertstream.steps.statistics import Statistics


class Place(Enum):
    HOST = "host"
    FIRST = 1


class Pair(NamedTuple):
    layer: int
    expert: int


@dataclass(frozen=True)
class Row:
    place: Place
    pair: Pair


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Plain:
    pass


class Stateful:
    def __repr__(self) -> str:
        return "<Stateful 3 slots>"


class DeviceTensor:
    """What a tensor on a device looks like; reading it would wait for the device."""

    shape = ()
    device = "cuda:0"

    def item(self) -> float:
        raise AssertionError("waited for the device")

    tolist = item


class HostTensor:
    """A 0-d tensor of torch, whose device is an object with a type."""

    class device:
        type = "cpu"

    shape = ()

    def item(self) -> float:
        return 2.5


@pytest.mark.parametrize(
    ("value", "rendered"),
    [
        (float("nan"), None),
        ([float("inf"), -float("inf"), 1.5], [None, None, 1.5]),
        (True, True),
        (2**80, 2**80),
        pytest.param(10**5000, hex(10**5000), id="10**5000"),
        (b"ab\xff", "ab\\xff"),
        ("lone \udc80", "lone \\udc80"),
        (Place.HOST, "host"),
        (Place.FIRST, "FIRST"),
        (http.HTTPStatus.OK, 200),
        (Row(Place.HOST, Pair(1, 2)), {"place": "host", "pair": [1, 2]}),
        ({"b", "a"}, ["a", "b"]),
        (range(3), [0, 1, 2]),
        (PurePosixPath("/a/b"), "/a/b"),
        (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "2026-01-02T00:00:00+00:00"),
        (datetime.timedelta(seconds=1.5), 1.5),
        (ValueError("bad"), "ValueError: bad"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (int, "int"),
        (Plain(), "<Plain>"),
        (Stateful(), "<Stateful 3 slots>"),
        (Rude(), "<Rude: RuntimeError while rendering>"),
        ([Rude(), 1], ["<Rude: RuntimeError while rendering>", 1]),
        (Statistics.zero(), Statistics.zero().as_dict()),
    ],
)
def test_value_becomes_json(value: object, rendered: object) -> None:
    """Contract 4.6: values are JSON: no NaN, no bytes, no Python reprs."""
    assert jsonable(value) == rendered
    assert type(jsonable(value)) is type(rendered)


def test_keys_become_text_and_none_hides_another() -> None:
    """Contract 4.6: keys that are tuples or enums are rendered as text; keys that meet stay apart."""
    keys = {(0, Place.HOST): 1, Place.FIRST: 2, None: 3, True: 4, 7: 5, "7": 6, 1.5: 7}
    assert jsonable(keys) == {"0,host": 1, "FIRST": 2, "null": 3, "true": 4, "7": 5, "7 (2)": 6, "1.5": 7}


@pytest.mark.parametrize(
    ("value", "rendered"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        (np.bool_(True), True),
        (np.array(7), 7),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (np.zeros(MAX_ITEMS + 1), f"<ndarray [{MAX_ITEMS + 1}]>"),
        (HostTensor(), 2.5),
    ],
)
def test_number_of_an_array_library_is_a_number(value: object, rendered: object) -> None:
    """Contract 4.6: NumPy and torch scalars are rendered as numbers."""
    assert jsonable(value) == rendered
    assert type(jsonable(value)) is type(rendered)


def test_tensor_on_a_device_is_named_and_not_read() -> None:
    """Logging never waits for a device: a tensor there is rendered as text."""
    assert jsonable(DeviceTensor()) == "<DeviceTensor [] on cuda:0>"


def test_cycle_and_depth_become_text() -> None:
    """Contract 4.6: a circular value and a bottomless one are rendered, not raised."""
    circle: list[object] = [1]
    circle.append({"again": circle})
    assert jsonable(circle) == [1, {"again": "<circular>"}]
    twice = [0]
    assert jsonable([twice, twice]) == [[0], [0]]
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    assert "<too deep>" in json.dumps(jsonable(deep))


def test_long_value_is_cut_and_says_so() -> None:
    """A value of any length makes a line of bounded length."""
    assert jsonable(range(10**12))[-1] == f"<{10**12 - MAX_ITEMS} more>"  # type: ignore[index]
    assert jsonable(dict.fromkeys(range(MAX_ITEMS + 2)))["…"] == "<2 more>"  # type: ignore[call-overload, index]


def test_iterator_is_not_consumed() -> None:
    """Rendering a value leaves it as it was."""

    def numbers() -> Iterator[int]:
        yield 1

    left = numbers()
    jsonable(left)
    assert next(left) == 1


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
KEYS = st.text(st.characters()) | st.integers() | st.tuples(st.integers(), st.text()) | st.sampled_from(Place)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


@given(VALUES)
def test_any_value_makes_strict_json_in_ascii(value: object) -> None:
    """Contract 4.6, for any value: it serialises strictly, as ASCII and as UTF-8, and renders to itself."""
    rendered = jsonable(value)
    line = json.dumps({"value": rendered}, allow_nan=False)
    json.dumps(rendered, allow_nan=False, ensure_ascii=False).encode("utf-8")
    assert parse_line(line) == {"value": rendered}
    assert jsonable(rendered) == rendered
