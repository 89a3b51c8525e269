"""The engine that the tests of the command line run against."""

from __future__ import annotations

import sys

import pytest
from fake_engine import FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """A fake engine in the place of the real one."""
    fake = FakeEngine()
    monkeypatch.setitem(sys.modules, fake.module().__name__, fake.module())
    return fake
