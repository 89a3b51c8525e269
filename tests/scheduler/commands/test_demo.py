"""`expertstream demo`: what it asks for and what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import FakeEngine
from source_checks import checkout

from expertstream.scheduler.cli import main
from expertstream.scheduler.commands import demo
from expertstream.scheduler.commands.generate import Generated
from expertstream.steps.statistics import Statistics, StepsByKind


def test_demo_absent_model_says_where_to_run_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo outside a checkout says what to do, with exit code 2."""
    monkeypatch.setattr(demo, "_MODEL", Path("absent", "model"))
    assert main(["demo"]) == 2
    assert "name a model's directory" in capsys.readouterr().err


def test_demo_streams_half_of_the_experts_unless_told(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo keeps half of the experts resident and drafts one token; flags are stronger; figures go to stderr."""
    monkeypatch.chdir(checkout())
    assert main(["demo", "--speculate", "0"]) == 0
    assert (engine.opened["slots"], engine.opened["speculate"]) == ("50%", "0")
    assert engine.opened["path"] == checkout() / "tests" / "models" / "tiny-qwen3_5-moe"
    out, err = capsys.readouterr()
    assert out.startswith("def ")
    assert out.endswith("one twö\n")
    assert "hits" in err


def test_demo_summary_rates_are_made_by_the_reader() -> None:
    """Contract 3.1: rates are computed by the reader, and a run of nothing has none."""
    counts = Statistics(
        steps=3, steps_by_kind=StepsByKind({"paged": 2, "draft": 1}), lookups=8, hits=6, joins=1, misses=1, bytes=4096
    )
    rows = dict(demo.summary_rows(Generated(10, 2.0, counts)))
    assert rows["steps"] == "3 (paged 2, draft 1)"
    assert rows["tokens generated"] == "10 (5.0 a second)"
    assert rows["hits"] == "6 (75.0% of lookups)"
    assert rows["copied to the device"] == "4,096 bytes"
    assert dict(demo.summary_rows(Generated(0, 0.0, Statistics())))["hits"] == "0 (none of lookups)"
