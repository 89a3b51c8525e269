"""Page-locking in chunks, with functions of the test's in the driver's place."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from expertstream.kernels import pinning as module
from expertstream.kernels.pinning import Pinning

WAIT_S = 20.0


class Driver:
    """Notes what is registered; refuses the chunk numbered `refuses`."""

    def __init__(self, refuses: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = refuses
        self.changed = threading.Condition()
        self.failures: list[str] = []

    def register(self, address: int, num_bytes: int) -> None:
        with self.changed:
            self.changed.notify_all()
            if len(self.registered) == self.refuses:
                raise OSError("no more locked memory")
            self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def on_failure(self, reason: str) -> None:
        with self.changed:
            self.failures.append(reason)
            self.changed.notify_all()

    def await_that(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=WAIT_S)


def start(driver: Driver, num_bytes: int, *, follows: bool = False) -> Pinning:
    block = torch.zeros(num_bytes, dtype=torch.uint8)
    pinning = Pinning(
        block, driver.register, driver.unregister, on_failure=driver.on_failure, follows=follows, chunk_bytes=64
    )
    pinning.start()
    return pinning


def join(pinning: Pinning) -> None:
    pinning._thread.join(WAIT_S)


def test_block_is_registered_in_chunks_and_unregistered_at_close() -> None:
    """Every byte is registered once, the last chunk being what is left; closing undoes it and may be repeated."""
    driver = Driver()
    pinning = start(driver, 150)
    join(pinning)
    assert driver.registered == {pinning.begin: 64, pinning.begin + 64: 64, pinning.begin + 128: 22}
    assert pinning.is_complete
    assert repr(pinning) == "<Pinning complete: 150 of 150 bytes>"
    pinning.close()
    pinning.close()
    assert driver.registered == {}


def test_refused_chunk_leaves_the_rest_pageable_and_says_so_once() -> None:
    """A failure is one reason with figures; what was registered stays so until close."""
    driver = Driver(refuses=1)
    pinning = start(driver, 150)
    join(pinning)
    assert not pinning.is_complete
    assert driver.failures == ["86 of 150 bytes of host memory stay pageable, copies are slower: no more locked memory"]
    assert pinning.failure == driver.failures[0]
    assert driver.registered == {pinning.begin: 64}
    pinning.close()
    assert driver.registered == {}


def test_following_registration_waits_for_the_filling() -> None:
    """A chunk is touched by whoever fills it, not by the registration."""
    driver = Driver()
    pinning = start(driver, 128, follows=True)
    pinning.note_progress(63, 128)
    pinning.note_progress(64, 128)
    driver.await_that(lambda: len(driver.registered) == 1)
    assert not pinning.is_complete
    pinning.note_progress(1, 1)
    join(pinning)
    assert pinning.is_complete
    pinning.close()


def test_following_registration_goes_on_when_the_filling_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filling that ends early never reaches the whole: the rest is registered all the same."""
    monkeypatch.setattr(module, "STALLED_S", 0.001)
    driver = Driver()
    pinning = start(driver, 128, follows=True)
    join(pinning)
    assert pinning.is_complete
    pinning.close()


def test_close_stops_a_registration_that_waits() -> None:
    """Closing does not wait for the filling."""
    driver = Driver()
    pinning = start(driver, 128, follows=True)
    pinning.close()
    assert driver.registered == {}
    assert not pinning._thread.is_alive()


def test_empty_block_is_complete_at_once() -> None:
    """Nothing to lock is locked."""
    pinning = start(Driver(), 0)
    join(pinning)
    assert pinning.is_complete
    pinning.close()


@pytest.mark.parametrize(
    ("offset", "num_bytes", "expected"),
    [
        (0, 64, [(0, 64)]),
        (10, 20, [(10, 20)]),
        (60, 8, [(60, 4), (64, 4)]),
        (60, 90, [(60, 4), (64, 64), (128, 22)]),
        (100, 51, [(100, 51)]),
    ],
)
def test_ranges_are_cut_where_chunks_meet(offset: int, num_bytes: int, expected: list[tuple[int, int]]) -> None:
    """CUDA refuses a copy whose source is registered in part; a range that leaves the block is not ours to cut."""
    pinning = start(Driver(), 150)
    pieces = pinning.pieces(pinning.begin + offset, num_bytes)
    assert [(address - pinning.begin, size) for address, size in pieces] == expected
    pinning.close()
