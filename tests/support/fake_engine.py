"""An engine without a model, for tests of what stands around one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from expertstream.steps.statistics import Statistics

__all__ = ["FakeEngine", "failing"]


@dataclass
class FakeEngine:
    """An engine whose one request yields given texts and then does what the test says."""

    texts: tuple[str, ...] = ("one", " twö")
    then: Callable[[], object] = lambda: None
    opened: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    closed: int = 0

    @asynccontextmanager
    async def open(self, path: Path, **settings: Any) -> AsyncIterator[FakeEngine]:
        self.opened = {"path": path, **settings}
        try:
            yield self
        finally:
            await asyncio.sleep(0)  # a close that awaits must not be cancelled in its turn
            self.closed += 1

    def module(self) -> ModuleType:
        """Returns a module to stand for `expertstream.scheduler.engine`."""
        module = ModuleType("expertstream.scheduler.engine")
        module.open = self.open  # type: ignore[attr-defined]
        return module

    async def generate(self, prompt: str, **options: Any) -> AsyncIterator[SimpleNamespace]:
        self.asked = {"prompt": prompt, **options}
        for text in self.texts:
            yield SimpleNamespace(text=text)
        result = self.then()
        if asyncio.iscoroutine(result):
            await result

    def statistics(self) -> Statistics:
        return Statistics()


def failing(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail
