"""The runtime of the tests: it must itself catch what it is there to catch."""

from __future__ import annotations

import pytest
import torch

from expertstream.kernels.runtime import CopyError
from expertstream.kernels.scripted import POISON, MissingWaitError, ScriptedCopy, ScriptedRuntime


def _bytes(value: int) -> torch.Tensor:
    return torch.full((64,), value, dtype=torch.uint8)


def test_copy_poisons_its_destination_until_the_script_ends_it() -> None:
    """What an evicted slot held is gone as soon as the next copy starts, so that a late reader shows."""
    runtime = ScriptedRuntime()
    target = _bytes(1)
    event = runtime.copy(target, _bytes(2), after=None)
    assert not event.done()
    assert torch.equal(target, _bytes(POISON))
    assert bool(target.view(torch.float32).isnan().all())
    event.wait()
    assert event.done()
    assert torch.equal(target, _bytes(2))


def test_fresh_device_memory_is_poison() -> None:
    """A slot that nothing was copied into is not readable either."""
    assert torch.equal(ScriptedRuntime().allocate_device(64), _bytes(POISON))


def test_overwriting_a_slot_that_is_read_without_waiting_is_refused() -> None:
    """Contract 2.5: a copy that does not name the last read of its destination is a failure."""
    runtime = ScriptedRuntime()
    target = _bytes(1)
    read = runtime.record_compute([target])
    with pytest.raises(MissingWaitError, match="last read"):
        runtime.copy(target, _bytes(2), after=None)
    assert torch.equal(target, _bytes(1))
    assert not read.done()


def test_overwriting_a_slot_after_an_older_read_is_refused() -> None:
    """The event must be that of the last read, not of one before it."""
    runtime = ScriptedRuntime()
    target = _bytes(1)
    older = runtime.record_compute([target])
    runtime.record_compute([target])
    with pytest.raises(MissingWaitError):
        runtime.copy(target, _bytes(2), after=older)


def test_overwriting_a_slot_after_its_last_read_awaits_that_read() -> None:
    """The right event is awaited, and a second copy need not name it again."""
    runtime = ScriptedRuntime()
    target, other = _bytes(1), _bytes(1)
    read = runtime.record_compute([target, other])
    runtime.copy(target, _bytes(2), after=read).wait()
    assert read.done()
    runtime.copy(target, _bytes(3), after=None).wait()
    assert torch.equal(target, _bytes(3))


def test_script_that_fails_a_copy_leaves_poison_and_raises() -> None:
    """A failed copy raises CopyError from the script's error whenever it is waited for; its bytes never arrive."""
    runtime = ScriptedRuntime(on_wait=lambda copy: copy.fail(OSError("link down")))
    target = _bytes(1)
    event = runtime.copy(target, _bytes(2), after=None)
    for _ in range(2):
        with pytest.raises(CopyError, match="link down"):
            event.wait()
    assert torch.equal(target, _bytes(POISON))


def test_script_that_leaves_a_copy_unfinished_fails_instead_of_hanging() -> None:
    """A wait that would never end is a failure."""
    runtime = ScriptedRuntime(on_wait=lambda copy: None)
    with pytest.raises(MissingWaitError, match="hang"):
        runtime.copy(_bytes(1), _bytes(2), after=None).wait()


def test_repr_counts_pending_copies() -> None:
    """The one line of state says how many copies have not ended."""
    runtime = ScriptedRuntime()
    for copy in (runtime.copy(_bytes(1), _bytes(2), after=None), runtime.copy(_bytes(1), _bytes(2), after=None)):
        assert isinstance(copy, ScriptedCopy)
    runtime.copies[0].finish()
    assert repr(runtime) == "<ScriptedRuntime 2 copies: 1 pending>"
