"""The set of numbers that were seen, against a plain set."""

from __future__ import annotations

import random

import pytest

from expertstream.scheduler.report import numbers
from expertstream.scheduler.report.numbers import Numbers


def ranges_of(seen: set[int]) -> list[tuple[int, int]]:
    """The ranges that are missing below the largest, the slow way."""
    gaps: list[tuple[int, int]] = []
    expected = 1
    for number in sorted(seen):
        if number > expected:
            gaps.append((expected, number - 1))
        expected = number + 1
    return gaps


@pytest.mark.parametrize("seed", range(20))
def test_numbers_agree_with_a_plain_set(seed: int) -> None:
    """In any order: what is new, what is missing, and what is there."""
    chance = random.Random(seed)
    size = chance.choice([5, 40, 3000, 5000])
    order = chance.choices(range(1, size + 1), k=size * chance.choice([1, 3]))
    order = sorted(order) if seed % 2 else order
    kept, plain = Numbers(), set[int]()
    for number in order:
        assert kept.add(number) == (number not in plain)
        plain.add(number)
    assert list(kept.missing()) == ranges_of(plain)
    assert [number for number in range(1, size + 2) if number in kept] == sorted(plain)
    assert kept.last == max(plain)


def test_numbers_in_order_or_filled_up_keep_no_page() -> None:
    """Constant memory: pages are there only while a number below is missing."""
    kept = Numbers()
    for number in [*range(1, 3000), *range(5000, 9000), *range(3000, 5000), *range(9000, 9100)]:
        assert kept.add(number)
    assert repr(kept) == "<Numbers to 9099, last 9099, 0 pages>"


def test_numbers_strewn_too_widely_are_followed_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of pages nothing is called missing or double, and the set says so."""
    monkeypatch.setattr(numbers, "_MAX_PAGES", 3)
    kept = Numbers()
    for number in (1, 5000, 50_000, 500_000):
        kept.add(number)
    assert (kept.is_followed, list(kept.missing())) == (True, [(2, 4999), (5001, 49_999), (50_001, 499_999)])
    assert kept.add(5_000_000)
    assert kept.add(5_000_000)
    assert (kept.is_followed, list(kept.missing())) == (False, [])
