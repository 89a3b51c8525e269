"""The allocation under the arena: exact, cut into places that are conserved, shared fairly by the layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
import torch
from stores import write_records

from expertstream.memory.arena_space import ArenaSpace
from expertstream.memory.records import ExpertKey


def test_initial_choice_is_an_equal_share_of_every_layer_in_the_order_of_the_layers(tmp_path: Path) -> None:
    """What is read ahead serves every layer alike, the first layers first, whatever their record sizes."""
    records = write_records(tmp_path, dict.fromkeys(range(4), 4), dtypes={0: torch.float32, 2: torch.bfloat16})
    large, small = records.layouts[0].num_bytes, records.layouts[2].num_bytes
    places: Mapping[int, int] = {small: 2, large: 6}
    space = ArenaSpace(torch.zeros(2 * small + 6 * large, dtype=torch.uint8), places)
    chosen = space.choose_initial(records.sources, records.layouts)
    assert chosen == [ExpertKey(layer, expert) for layer in range(4) for expert in range(2)]


def test_space_that_does_not_fit_its_block_is_refused() -> None:
    """One exact allocation: neither a byte more nor less than its places."""
    with pytest.raises(ValueError, match="arena block has 100 bytes; its places need 128"):
        ArenaSpace(torch.zeros(100, dtype=torch.uint8), {64: 2})


def test_places_of_a_space_are_conserved_and_do_not_overlap() -> None:
    """Over 10,000 random takes and returns: taken plus free are the places, and no two share a byte."""
    random, places = Random(0), {64: 5, 192: 3}
    block = torch.zeros(64 * 5 + 192 * 3, dtype=torch.uint8)
    space, taken = ArenaSpace(block, places), list[tuple[int, int]]()
    for _ in range(10_000):
        size = random.choice([64, 192])
        if random.random() < 0.5 and taken:
            space.give_back(*taken.pop(random.randrange(len(taken))))
        else:
            place = space.take_free(size)
            held = sum(each == size for each, _ in taken)
            assert (place is None) == (held == places[size])
            taken += [] if place is None else [(size, place)]
        assert len(set(taken)) == len(taken)
    for index, (size, place) in enumerate(taken):
        space.record(size, place).fill_(index + 1)
    assert all(bool((space.record(size, place) == index + 1).all()) for index, (size, place) in enumerate(taken))
