"""The value in which residency says what it did."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from expertstream.memory.outcome import Outcome


def test_outcomes_add_field_by_field() -> None:
    """A step's outcome is the sum over its layers, in every field; the empty outcome adds nothing."""
    names = [field.name for field in fields(Outcome)]
    one, two = Outcome(*range(1, len(names) + 1)), Outcome(*range(100, 100 + len(names)))
    for number, name in enumerate(names):
        assert getattr(one + two, name) == 101 + 2 * number
    assert one + Outcome() == one


def test_outcome_cannot_be_changed() -> None:
    """What happened has happened."""
    with pytest.raises(FrozenInstanceError):
        Outcome().hits = 1  # type: ignore[misc]
