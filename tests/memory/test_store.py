"""The expert store: every expert is served once, with its own bytes, and is counted."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from stores import open_store

from expertstream.kernels.cpu import CpuRuntime
from expertstream.kernels.runtime import Runtime
from expertstream.kernels.scripted import ScriptedRuntime
from expertstream.memory.outcome import Outcome
from expertstream.memory.records import ExpertKey


@pytest.fixture(params=["cpu", "scripted"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Both shipped runtimes: a real copy thread, and one that poisons and refuses a missing wait."""
    return CpuRuntime() if request.param == "cpu" else ScriptedRuntime()


def _flat(batches: list[tuple[int, ...]]) -> list[int]:
    return [expert for batch in batches for expert in batch]


def test_misses_are_filled_and_then_hit(tmp_path: Path, runtime: Runtime) -> None:
    """Contract 2.2, 3.2: an absent expert is one miss, one fill and one record's bytes; a resident one moves none."""
    with open_store(tmp_path, runtime=runtime) as tiny:
        size = tiny.records.layouts[0].num_bytes
        assert tiny.serve([2, 0, 1]) == [(2, 0, 1)]
        last = tiny.last
        assert (last.lookups, last.misses, last.fills, last.bytes, last.evictions) == (3, 3, 3, 3 * size, 0)
        assert last.copy_ns > 0
        assert tiny.serve([0, 1]) == [(0, 1)]
        assert tiny.last == Outcome(lookups=2, hits=2)
        assert tiny.store.num_bytes == 4 * size
        assert repr(tiny.store) == "<ExpertStore 1 layers, 4 slots: 3 resident, 0 held>"
        assert tiny.store.take_outcome() == Outcome()


def test_expert_that_is_wanted_is_not_evicted_for_another_of_the_same_lookup(tmp_path: Path, runtime: Runtime) -> None:
    """Hits before victims: the coldest resident stays when this very look-up wants it."""
    with open_store(tmp_path, num_slots=3, runtime=runtime) as tiny:
        tiny.serve([0, 1, 2])
        assert sorted(_flat(tiny.serve([5, 0]))) == [0, 5]
        assert (tiny.last.hits, tiny.last.evictions) == (1, 1)
        assert tiny.residents() == {0, 2, 5}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("num_slots", "places"), [(1, 1), (2, None), (3, 2), (5, 3), (8, None)])
def test_any_number_of_slots_serves_every_expert_once_and_exact(
    tmp_path: Path, runtime: Runtime, num_slots: int, places: int | None, overlap: bool
) -> None:
    """Contract 2.8: what does not fit is served in waves; every expert is lent once, with its own bytes."""
    random = Random(num_slots)
    with open_store(tmp_path, num_slots=num_slots, places=places, runtime=runtime, policy="lrfu") as tiny:
        for _ in range(40):
            wanted = random.sample(range(8), random.randrange(1, 9))
            recent = random.choice([None, wanted[-3:]])
            batches = tiny.serve(wanted, recent=recent, overlap=overlap)
            assert sorted(_flat(batches)) == sorted(wanted)
            assert tiny.last.lookups == len(wanted)
            assert tiny.last.bytes == tiny.last.fills * tiny.records.layouts[0].num_bytes
            assert (tiny.last.waves > 0) == (len(wanted) > num_slots)
            tiny.store.age += 1
        assert len(tiny.residents()) == num_slots
        assert "0 held" in repr(tiny.arena)


def test_waves_of_a_decode_step_are_counted(tmp_path: Path) -> None:
    """Contract 3.2: `waves` are the passes beyond the first; each wave's copies are ordinary fills."""
    with open_store(tmp_path, num_slots=3) as tiny:
        assert tiny.serve([0, 1, 2, 3, 4, 5, 6]) == [(0, 1, 2), (3, 4, 5), (6,)]
        assert (tiny.last.waves, tiny.last.fills, tiny.last.evictions) == (2, 7, 4)


def test_arena_below_the_experts_counts_what_it_reads(tmp_path: Path, runtime: Runtime) -> None:
    """With records on disk only, decoding still serves everything and counts reads and bytes from disk."""
    with open_store(tmp_path, num_slots=2, places=2, runtime=runtime) as tiny:
        for experts in ([4, 5], [6, 7], [4, 5], [0, 1]):
            tiny.serve(experts)
        assert 6 <= tiny.total.reads <= 8
        assert tiny.total.bytes_disk == tiny.total.reads * tiny.records.sources[ExpertKey(0, 0)].num_bytes


def test_residents_are_lent_before_the_copies_are_awaited(tmp_path: Path) -> None:
    """Copies overlap compute: when the first batch is lent the copies have started and are not done."""
    runtime = ScriptedRuntime()
    with open_store(tmp_path, runtime=runtime) as tiny:
        tiny.serve([0, 1])
        seen = [
            ([lease.expert for lease in leases], [copy.done() for copy in runtime.copies[2:]])
            for leases in tiny.store.serve(0, [0, 4, 1, 5], None, overlap=True)
        ]
        assert seen == [([0, 1], [False, False]), ([4, 5], [True, True])]


def test_without_overlap_a_wave_is_lent_at_once(tmp_path: Path) -> None:
    """Small records are computed in one batch: hits and fills together, after the copies."""
    with open_store(tmp_path) as tiny:
        tiny.serve([0, 1])
        assert tiny.serve([0, 4, 1, 5]) == [(0, 1, 4, 5)]


def test_layers_have_residencies_of_their_own(tmp_path: Path, runtime: Runtime) -> None:
    """Contract 2.4: the same expert number of another layer is another expert."""
    with open_store(tmp_path, num_layers=3, num_slots=2, runtime=runtime) as tiny:
        for layer in (0, 1, 2, 0):
            tiny.serve([1, 4], layer=layer)
        assert tiny.last.hits == 2
        assert tiny.total.misses == 6


@pytest.mark.parametrize("policy", ["lru", "lrfu"])
def test_layers_of_mixed_record_sizes_keep_their_residents(tmp_path: Path, policy: str) -> None:
    """Contract 2.3: alternating record sizes flush nothing: decoding over 50 steps only hits after the first."""
    dtypes = {1: torch.bfloat16, 3: torch.bfloat16}
    with open_store(tmp_path, num_layers=4, dtypes=dtypes, policy=policy) as tiny:
        for step in range(50):
            for layer in range(4):
                tiny.serve([1, 3, 6], layer=layer)
                assert tiny.last.hits == (3 if step else 0)
            tiny.store.age += 1
        sizes = [tiny.records.layouts[layer].num_bytes for layer in range(4)]
        assert sizes[0] > sizes[1]
        assert tiny.store.num_bytes == 4 * sum(sizes)


def test_slots_of_every_layer_are_aligned(tmp_path: Path) -> None:
    """A product reads the same alignment in whatever slot an expert lies."""
    with open_store(tmp_path, num_layers=2, dtypes={0: torch.bfloat16}, runtime=CpuRuntime()) as tiny:
        for layer in range(2):
            for part in tiny.store.parts(layer).values():
                assert all(part[slot].data_ptr() % 64 == 0 for slot in range(4))


def test_all_slots_held_by_another_is_an_error_and_no_slot_is_taken(tmp_path: Path) -> None:
    """Where no slot can be had the look-up fails instead of taking one that is in use."""
    with open_store(tmp_path, num_slots=2) as tiny:
        tiny.serve([0, 1])
        for expert in (0, 1):
            tiny.store.table(0).hold(expert)
        with pytest.raises(RuntimeError, match="no slot can be had for 1 experts: <SlotTable 2 slots: 2 res"):
            tiny.serve([5])
        assert tiny.residents() == {0, 1}
        tiny.store.table(0).release(0)
        tiny.serve([5])
        assert tiny.residents() == {1, 5}


def test_unknown_policy_is_refused(tmp_path: Path) -> None:
    """A wrong policy name says which there are."""
    with (
        pytest.raises(ValueError, match="unknown policy 'best'"),
        open_store(tmp_path, policy="best"),
    ):
        pass


def test_hits_held_by_another_stay_held_after_the_lookup(tmp_path: Path) -> None:
    """A look-up releases as often as it held, and no more."""
    with open_store(tmp_path) as tiny:
        tiny.serve([0, 1])
        tiny.store.table(0).hold(0)
        tiny.serve([0, 1, 2])
        assert tiny.store.table(0).is_held(0)
        assert tiny.store.table(0).num_held == 1
