"""`expertstream report` as it is run: what it shows, and its exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from environment import run_python

from expertstream.scheduler.cli import main
from expertstream.scheduler.report.sections import Section
from expertstream.scheduler.report.text import write_sections

Entries = list[Any]


@pytest.fixture
def log(good: Entries, tmp_path: Path) -> Path:
    """A good log."""
    path = tmp_path / "good.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in good), encoding="utf-8")
    return path


def test_command_shows_what_ran_in_plain_text(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ran, the figures, rates made of one record, warnings with codes and the meaning; no colour, no borders."""
    assert main(["report", str(log), "--check"]) == 0
    out = capsys.readouterr().out
    for words in (
        "it ran to its exit",
        "small (type not told)",
        "float32 on cpu",
        "8 for 16 experts",
        "lru",
        "torch none",
        "14 (paged 14)",
        "5 (draft 5)",
        "19 (paged 14, draft 5)",
        "(25.0% of lookups)",
        "1,792 bytes",
        "warning slots.below_working_set  1",
        "violations: none",
    ):
        assert words in out
    assert "\x1b" not in out
    assert out.isascii()


def test_command_prints_json_with_rates_or_null(good: Entries, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rate of nothing is null, not NaN and not 0."""
    assert main(["report", "--json", str(log)]) == 0
    values = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    (run,) = values["runs"]
    assert (run["totals"]["hit_rate"], run["totals"]["steps"], values["num_violations"]) == (0.25, 19, 0)
    assert "violations" not in values
    zero = dict.fromkeys(run["totals"], 0) | {"steps_by_kind": dict.fromkeys(run["totals"]["steps_by_kind"], 0)}
    final = good[-1] | {"seq": 2, "stores": [], "totals": zero, "reason": "refused"}
    log.write_text(f"{json.dumps(good[0])}\n{json.dumps(final)}\n", encoding="utf-8")
    assert main(["report", "--json", "--check", str(log)]) == 0
    totals = json.loads(capsys.readouterr().out)["runs"][0]["totals"]
    assert [totals[name] for name in ("hit_rate", "stall_share", "acceptance_rate")] == [None] * 3


def test_command_check_exits_with_1_and_names_the_line(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Violations are exit code 1 with --check, each with file and line; without it they are only counted."""
    lines = log.read_text(encoding="utf-8").splitlines()
    lines[3] = lines[3].replace('"joins": 4', '"joins": 5')
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(["report", str(log), "--check"]) == 1
    out = capsys.readouterr().out
    assert f"{log}:4  [invariant] statistics: lookups 16 is not hits 4 + joins 5" in out
    assert main(["report", str(log)]) == 0
    assert "1 violations: --check lists them" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["nowhere.jsonl"], ["."], ["--chekc"]])
def test_command_wrong_use_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A log that is not there or is no file, none at all, or an unknown flag: one line and 2."""
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("expertstream: error: ")
    assert captured.err.count("\n") == 1


def test_command_reads_stdin_and_imports_no_torch(log: Path) -> None:
    """Contract 5.5: a report needs neither torch nor transformers; "-" is stdin."""
    code = (
        "import io, sys\nfrom expertstream.scheduler.cli import main\n"
        f"sys.stdin = io.TextIOWrapper(open({str(log)!r}, 'rb'))\n"
        "code = main(['report', '-', '--check'])\n"
        "print('CODE', code, 'HEAVY', {'torch', 'transformers', 'cupy', 'numpy'} & set(sys.modules))"
    )
    done = run_python(["-c", code])
    assert done.stdout.endswith("CODE 0 HEAVY set()\n"), done.stdout + done.stderr


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.mark.parametrize("out", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_command_text_of_a_log_cannot_move_the_cursor(out: io.StringIO) -> None:
    """What a log holds is shown, not obeyed: control characters are escaped, and brackets are no markup."""
    write_sections([Section("a\x1b[2J", [("[red]name", "b\x1b]0;title\x07\u202e\nc")])], out)
    shown = out.getvalue()
    assert r"b\x1b]0;title\x07\u202e\nc" in shown
    assert "[red]name" in shown
    assert "\x1b[2J" not in shown
    assert ("│" in shown) == isinstance(out, Terminal)


def test_command_text_that_the_encoding_lacks_is_escaped() -> None:
    """A model's name in another script is no error where stdout is ASCII."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    write_sections([Section("模型", [("name", "模型 \ud800")])], out)
    out.flush()
    assert raw.getvalue().count(b"\\u6a21") == 2
