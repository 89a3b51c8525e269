"""What opening an engine settles: what is refused, what `auto` means, and what is said once on the log."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from environment import changed_variables
from tiny import PROMPT, TINY, greedy, quiet

import expertstream
from expertstream.memory import policy as policies
from expertstream.memory.budget import InsufficientHostMemoryError
from expertstream.memory.policy import LeastRecent, register_policy
from expertstream.scheduler import loading
from expertstream.scheduler.loading import NotDeterministicError

pytestmark = pytest.mark.anyio
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Opening is the same under any loop; one is enough."""
    backend: str = request.param
    return backend


def test_opening_outside_asyncio_is_refused() -> None:
    """Without a running asyncio or uvloop loop opening is a RuntimeError that says what to do."""
    with pytest.raises(RuntimeError, match=r"runs under asyncio or uvloop; .*not trio"):
        next(expertstream.open(TINY, **quiet()).__await__())


def test_unknown_argument_is_refused_at_the_call() -> None:
    """Contract 5.3: an unknown argument of `open` is an error with the nearest name, before anything is entered."""
    with pytest.raises(expertstream.SettingError, match="the nearest is slots"):
        expertstream.open(TINY, slot="50%")


async def test_auto_is_float32_and_every_expert_on_the_cpu() -> None:
    """Contract 5.6: on the CPU `dtype` auto is float32; `slots` auto is every expert where they fit."""
    async with expertstream.open(TINY, **quiet(device="cpu", max_model_len=64)) as engine:
        assert (engine.facts["dtype"], engine.facts["device"]) == ("float32", "cpu")
        assert engine.facts["slots"] == engine.facts["experts"]
        assert engine.facts["row_exact"] is True


async def test_max_model_len_is_capped_only_when_it_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is what the model allows, at most a cap; a larger number is taken as it is."""
    monkeypatch.setattr(loading, "LONGEST_AUTO", 48)
    async with expertstream.open(TINY, **quiet(device="cpu")) as engine:
        assert engine.facts["max_model_len"] == 48
    async with expertstream.open(TINY, **quiet(device="cpu", max_model_len=96)) as engine:
        assert engine.facts["max_model_len"] == 96


@pytest.mark.parametrize("slots", [0, -1, 3, "1%", "-1GiB"])
async def test_budget_that_cannot_serve_a_token_is_refused_through_open(slots: object) -> None:
    """Contract 2.3: zero, negative and fewer slots than top-k are refused with the smallest setting that works."""
    with pytest.raises(expertstream.InsufficientSlotsError, match=r"the smallest setting that works is \d+ bytes"):
        await expertstream.open(TINY, **quiet(device="cpu", slots=slots))
    with pytest.raises(InsufficientHostMemoryError, match=r"the smallest setting that works is \d+ bytes"):
        await expertstream.open(TINY, **quiet(device="cpu", host_memory=1))


@needs_no_gpu
async def test_gpu_that_is_not_there_is_refused() -> None:
    """A device that was asked for and cannot be used is an error that names a way out."""
    with pytest.raises(expertstream.DeviceUnavailableError, match=r"finds no GPU; device=cpu runs without one"):
        await expertstream.open(TINY, **quiet(device="cuda"))


def test_deterministic_is_refused_where_rows_are_computed_together() -> None:
    """`deterministic` changes nothing on the CPU, and is refused on a GPU."""
    from expertstream.scheduler.settings import Settings

    settings = Settings(deterministic=True)
    assert loading._is_row_exact(settings, torch.device("cpu"))
    with pytest.raises(NotDeterministicError, match="rows of a product depend on the rows beside them"):
        loading._is_row_exact(settings, torch.device("cuda"))


async def test_unknown_variable_is_one_warning_entry_of_an_embedded_engine() -> None:
    """Contract 5.3: an unknown EXPERTSTREAM_* variable is one warning on the log."""
    arguments = quiet(device="cpu", max_model_len=64)
    with changed_variables({"EXPERTSTREAM_SLOT": "50%"}):
        opening = expertstream.open(TINY, **arguments)
    async with opening:
        pass
    warnings = [entry for entry in entries_of(arguments["log_stream"]) if entry["event"] == "warning"]
    assert [entry["code"] for entry in warnings] == ["settings.unknown_variable"]
    assert "EXPERTSTREAM_SLOT" in warnings[0]["message"]


def entries_of(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


async def test_entries_of_a_life_come_in_order_and_say_what_was_built() -> None:
    """Contract 4.3: store.built has serial, sizes, slots, device, versions and the settings with their sources."""
    arguments = quiet(device="cpu", max_model_len=64, slots="50%")
    async with expertstream.open(TINY, **arguments) as engine:
        facts = dict(engine.facts)
    entries = entries_of(arguments["log_stream"])
    assert [entry["event"] for entry in entries if entry["event"] != "streaming.requested"] == [
        "store.built",
        "store.closed",
    ]
    built = next(entry for entry in entries if entry["event"] == "store.built")
    assert {name: built[name] for name in facts} == json.loads(json.dumps(facts))
    assert built["settings"]["slots"] == {"value": "50%", "source": "argument"}
    assert built["settings"]["policy"]["source"] == "default"
    assert {"torch", "transformers", "python"} <= set(built["versions"])


async def test_a_registered_policy_serves_an_engine_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 2.10: policies are plug-ins: one that is registered is usable by its name."""
    monkeypatch.setattr(policies, "_FACTORIES", dict(policies._FACTORIES))
    evicted: list[int] = []

    class MostRecent(LeastRecent):
        """The worst of policies: what was used last goes first."""

        def victims(self) -> Iterator[int]:
            return iter(list(reversed(self._order)))

        def remove(self, expert: int) -> None:
            evicted.append(expert)
            super().remove(expert)

    register_policy("most-recent", MostRecent)
    async with expertstream.open(TINY, **quiet(slots=8, policy="most-recent")) as engine:
        tokens = [token.id async for token in engine.generate(PROMPT, max_tokens=8)]
    assert tokens == greedy()[:8]
    assert evicted
    assert engine.facts["policy"] == "most-recent"


async def test_a_test_switch_that_is_on_warns() -> None:
    """Contract 3.4: a test switch says that it is on, and inflates no counter but the time of copies."""
    log = io.StringIO()
    with changed_variables({"EXPERTSTREAM_TEST_THROTTLE_COPY": "1e9"}):
        async with expertstream.open(TINY, log_stream=log, stats_every=0, slots=8) as engine:
            assert [token.id async for token in engine.generate(PROMPT, max_tokens=3)] == greedy()[:3]
            assert engine.statistics().violations() == []
    assert "test_switch.throttle_copy" in log.getvalue()
