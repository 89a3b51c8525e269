"""`expertstream verify`: its exit code and where it writes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from expertstream.scheduler.cli import main


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("as_json", [True, False])
def test_verify_difference_is_code_1(
    passed: bool, code: int, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify` exits with 1 where the tokens differ; --json keeps stdout to one object."""

    @dataclass(frozen=True)
    class Report:
        passed: bool
        path: Path

        def as_dict(self) -> dict[str, object]:
            return {"passed": self.passed, "path": str(self.path)}

    async def verify(
        path: Path, *, per_layer: bool, settings: dict[str, object], report: Any, log_stream: Any
    ) -> Report:
        assert log_stream is sys.stderr
        assert (per_layer, settings) == (True, {"slots": "25%"})
        report("checking")
        return Report(passed, path)

    module = ModuleType("expertstream.scheduler.verify")
    module.verify = verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    flags = ["--per-layer", "--slots", "25%", *(["--json"] if as_json else [])]
    assert main(["verify", "model", *flags]) == code
    out, err = capsys.readouterr()
    assert "checking" in (err if as_json else out)
    assert not as_json or json.loads(out) == {"passed": passed, "path": "model"}
