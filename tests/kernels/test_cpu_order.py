"""The order of a copy and of the last read of its slot, seen from that read."""

from __future__ import annotations

import torch

from expertstream.kernels.cpu import CpuRuntime


class LastRead:
    """An event of a compute stream that notes what is in the slot when it is awaited."""

    copy_ns = stall_ns = 0

    def __init__(self, slot: torch.Tensor) -> None:
        self._slot = slot
        self.seen: list[list[int]] = []

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self.seen.append(self._slot.tolist())


def test_copy_has_written_nothing_when_it_awaits_the_last_read_of_its_slot() -> None:
    """Contract 2.5: the copy thread awaits the last read of a slot, once, before it overwrites it."""
    runtime = CpuRuntime()
    slot = torch.full((4,), 1, dtype=torch.uint8)
    read = LastRead(slot)
    runtime.copy(slot, torch.full((4,), 2, dtype=torch.uint8), after=read).wait()
    runtime.close()
    assert read.seen == [[1, 1, 1, 1]]
    assert slot.tolist() == [2, 2, 2, 2]
