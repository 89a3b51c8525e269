"""Budgets are ceilings, and a refusal names a setting that works."""

from __future__ import annotations

import re
from random import Random

import pytest

from expertstream.memory.budget import (
    InsufficientHostMemoryError,
    InsufficientSlotsError,
    LayerNeed,
    plan_places,
    plan_slots,
)

UNIFORM = [LayerNeed(number, 64, 8, 1000) for number in range(4)]
MIXED = [LayerNeed(number, 16 + number, 2 + number % 3, (640, 1984)[number % 2]) for number in range(5)]


def _bytes(slots: dict[int, int], layers: list[LayerNeed]) -> int:
    return sum(slots[need.number] * need.record_bytes for need in layers)


def _plan(kind: str, amount: float, layers: list[LayerNeed], available: int | None = None) -> dict[int, int]:
    return plan_slots(kind, amount, layers, available_bytes=available, taken={"weights": 5})


def _random_layers(random: Random) -> list[LayerNeed]:
    num_experts = random.randrange(1, 40)
    return [
        LayerNeed(number, num_experts, random.randrange(1, min(num_experts, 9) + 1), 64 * random.randrange(1, 60))
        for number in range(random.randrange(1, 7))
    ]


def test_slots_of_random_byte_budgets_never_exceed_the_ceiling() -> None:
    """Contract 2.3: what is reserved is at most the budget, and what is left would give nobody a slot more."""
    random, num_planned = Random(0), 0
    for _ in range(200):
        layers = _random_layers(random)
        budget = random.randrange(1, 2 * sum(need.num_experts * need.record_bytes for need in layers))
        try:
            slots = _plan("bytes", budget, layers)
        except InsufficientSlotsError:
            assert budget < sum(need.top_k * need.record_bytes for need in layers)
            continue
        num_planned += 1
        assert _bytes(slots, layers) <= budget
        most = max(slots[need.number] - need.top_k for need in layers)
        for need in layers:
            assert need.top_k <= slots[need.number] <= need.num_experts
            assert slots[need.number] == need.num_experts or slots[need.number] - need.top_k >= most - 1
        open_layers = [need for need in layers if slots[need.number] < need.num_experts]
        if open_layers:
            assert budget - _bytes(slots, layers) < sum(need.record_bytes for need in open_layers)
    assert num_planned > 100


def test_slots_of_random_auto_budgets_fit_what_is_available_and_only_fail_when_nothing_works() -> None:
    """`auto` takes every expert or what fits, and refuses only where the least that works is above what there is."""
    random, refused = Random(1), 0
    for _ in range(200):
        layers = _random_layers(random)
        available = random.randrange(-100, 2 * sum(need.num_experts * need.record_bytes for need in layers))
        least = sum(need.top_k * need.record_bytes for need in layers)
        try:
            slots = _plan("auto", 0, layers, available)
        except InsufficientSlotsError as exc:
            refused += 1
            message = str(exc)
        else:
            assert _bytes(slots, layers) <= available
            continue
        assert available < least
        assert f"no setting works: the least is {least} bytes" in message
    assert 0 < refused < 100


def test_auto_gives_every_expert_a_slot_where_they_fit() -> None:
    """With room for all there is nothing to stream; within 90 % of what is available."""
    everything = {need.number: 64 for need in UNIFORM}
    assert _plan("auto", 0, UNIFORM) == everything
    assert _plan("auto", 0, UNIFORM, 284_445) == everything
    assert _bytes(_plan("auto", 0, UNIFORM, 100_000), UNIFORM) == 90_000


@pytest.mark.parametrize(
    ("kind", "amount", "expected"),
    [
        ("per_layer", 8, [8, 8, 8, 8]),
        ("per_layer", 1000, [64, 64, 64, 64]),
        ("bytes", 32_000, [8, 8, 8, 8]),
        ("bytes", 34_999, [9, 9, 8, 8]),
        ("bytes", 10**9, [64, 64, 64, 64]),
        ("share", 0.25, [16, 16, 16, 16]),
        ("share", 0.29, [18, 18, 18, 18]),
        ("share", 1.0, [64, 64, 64, 64]),
    ],
)
def test_slots_of_each_kind_of_budget(kind: str, amount: float, expected: list[int]) -> None:
    """Contract 5.2: slots per layer, bytes of the whole pool, or a share of all experts."""
    assert list(_plan(kind, amount, UNIFORM).values()) == expected


def test_slots_of_mixed_record_sizes_do_not_pay_the_largest_everywhere() -> None:
    """Contract 2.3: slots are sized per record size; small records leave room for more of them."""
    layers = [LayerNeed(0, 32, 4, 1024), LayerNeed(1, 32, 4, 4096)]
    assert _plan("bytes", 51_200, layers) == {0: 10, 1: 10}
    assert _plan("bytes", 52_300, layers) == {0: 11, 1: 10}


@pytest.mark.parametrize("layers", [UNIFORM, MIXED], ids=["uniform", "mixed"])
@pytest.mark.parametrize(("kind", "amount"), [("per_layer", 1), ("bytes", 1000), ("share", 0.05), ("bytes", 0)])
def test_refusal_names_the_smallest_settings_that_work_and_they_do(
    kind: str, amount: float, layers: list[LayerNeed]
) -> None:
    """Contract 2.3: a budget below top-k is refused with the smallest setting that works, in bytes and in slots."""
    with pytest.raises(InsufficientSlotsError, match="smallest setting that works") as caught:
        _plan(kind, amount, layers, 10**9)
    message = str(caught.value)
    assert "weights 5 bytes are taken" in message
    smallest_bytes, per_layer = map(int, re.findall(r"is (\d+) bytes for all .*, or (\d+) slots per layer", message)[0])
    for kind_that_works, amount_that_works in (("bytes", smallest_bytes), ("per_layer", per_layer)):
        slots = _plan(kind_that_works, amount_that_works, layers, 10**9)
        assert all(slots[need.number] >= need.top_k for need in layers)
        with pytest.raises(InsufficientSlotsError):
            _plan(kind_that_works, amount_that_works - 1, layers, 10**9)


@pytest.mark.parametrize(("kind", "amount"), [("per_layer", 40), ("bytes", 160_000), ("share", 0.9)])
def test_budget_above_the_device_is_refused_with_the_settings_that_work(kind: str, amount: float) -> None:
    """Contract 2.3: more slots than there is memory for are refused, with what is taken, the least and the most."""
    with pytest.raises(InsufficientSlotsError, match="100000 bytes are available") as caught:
        _plan(kind, amount, UNIFORM, 100_000)
    least, most = map(int, re.findall(r"is (\d+) bytes for all .* the largest is (\d+) bytes", str(caught.value))[0])
    assert most == 100_000
    for works in (least, most):
        assert _bytes(_plan("bytes", works, UNIFORM, 100_000), UNIFORM) <= 100_000


def test_device_too_small_for_one_token_says_that_no_setting_works() -> None:
    """Contract 2.3: where nothing helps the message does not suggest a setting."""
    for kind, amount in (("auto", 0), ("bytes", 10), ("per_layer", 64), ("share", 1.0)):
        with pytest.raises(InsufficientSlotsError, match="no setting works: the least is 32000 bytes") as caught:
            _plan(kind, amount, UNIFORM, 31_999)
        assert "smallest" not in str(caught.value)


@pytest.mark.parametrize("layers", [UNIFORM, MIXED], ids=["uniform", "mixed"])
def test_places_never_exceed_the_ceiling_and_the_named_smallest_works(layers: list[LayerNeed]) -> None:
    """Contract 2.3: a host budget is a ceiling; a refusal names the smallest that works, and one byte less does not."""
    random = Random(2)
    everything = sum(need.num_experts * need.record_bytes for need in layers)
    for _ in range(200):
        budget = random.randrange(0, 2 * everything)
        try:
            places = plan_places("bytes", budget, layers, available_bytes=None)
        except InsufficientHostMemoryError as exc:
            (smallest,) = map(int, re.findall(r"smallest setting that works is (\d+) bytes", str(exc)))
            assert budget < smallest
            plan_places("bytes", smallest, layers, available_bytes=None)
            with pytest.raises(InsufficientHostMemoryError):
                plan_places("bytes", smallest - 1, layers, available_bytes=None)
            continue
        assert sum(size * count for size, count in places.items()) <= budget
        for need in layers:
            assert places[need.record_bytes] >= need.top_k


def test_places_of_an_exact_budget_lose_none_to_rounding() -> None:
    """A budget of exactly so many records holds so many."""
    layers = [LayerNeed(0, 100, 1, 64)]
    for count in range(1, 101):
        assert plan_places("bytes", 64 * count, layers, available_bytes=None) == {64: count}


def test_places_of_auto_and_share() -> None:
    """Unless told otherwise every expert has a place; sizes are listed from the smallest."""
    assert plan_places("auto", 0, MIXED, available_bytes=None) == {640: 16 + 18 + 20, 1984: 17 + 19}
    assert list(plan_places("auto", 0, list(reversed(MIXED)), available_bytes=None)) == [640, 1984]
    assert plan_places("share", 0.5, UNIFORM, available_bytes=None) == {1000: 128}
    assert plan_places("share", 1.0, UNIFORM, available_bytes=None) == {1000: 256}


def test_places_above_the_hosts_memory_are_refused_and_a_lower_setting_works() -> None:
    """Contract 2.3: the message says how much there is, and that much works."""
    with pytest.raises(InsufficientHostMemoryError, match="take 256000 bytes and 100000 bytes") as caught:
        plan_places("auto", 0, UNIFORM, available_bytes=100_000)
    assert "stay on disk" in str(caught.value)
    assert plan_places("bytes", 100_000, UNIFORM, available_bytes=100_000) == {1000: 100}
