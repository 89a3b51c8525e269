"""The command line: help, flags for every setting, and the messages of a wrong use."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from environment import run_python
from fake_engine import FakeEngine

from expertstream.scheduler.cli import main
from expertstream.scheduler.settings import SettingRow, describe, resolve

ROWS = describe(resolve({}, environ={}))
COMMANDS = ("generate", "verify", "config", "demo")


def test_help_of_every_command_needs_no_torch_and_honours_no_color() -> None:
    """Contract 5.5: --help imports neither torch nor transformers nor CuPy; NO_COLOR means no colour."""
    code = (
        "import sys\n"
        "from expertstream.scheduler.cli import main\n"
        f"codes = [main([*command, '--help']) for command in [[], *([name] for name in {COMMANDS})]]\n"
        "heavy = {'torch', 'transformers', 'cupy', 'uvloop'} & set(sys.modules)\n"
        "print('HEAVY', heavy, 'CODES', codes)"
    )
    plain = run_python(["-c", code], {"NO_COLOR": "1", "FORCE_COLOR": "1", "COLUMNS": "100"})
    assert plain.stdout.endswith(f"HEAVY set() CODES {[0] * 5}\n"), plain.stderr
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", plain.stdout)
    text = re.sub(r"\x1b\[[0-9;]*m", "", plain.stdout)
    assert text.count("For example:") == 5
    for command in COMMANDS:
        assert f"expertstream {command}" in text
    coloured = run_python(["-c", code], {"FORCE_COLOR": "1", "COLUMNS": "100"})
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", coloured.stdout), "the check above would see a colour"


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_of_every_command_are_the_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract 5.1: each setting is a flag of each command."""
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert [row.flag for row in ROWS if f"{row.flag} " not in text] == []


GIVEN = {
    "slots": "50%",
    "device": "cpu",
    "policy": "lrfu",
    "log_format": "console",
    "log_level": "error",
    "decide": "host",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_flag_given_is_the_setting_from_an_argument(row: SettingRow, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract 5.1: a flag is an explicit argument; it reaches its own setting and no other."""
    value = GIVEN.get(row.name, row.default if row.default not in ("auto", "none", "false") else "1")
    value = "float16" if row.name == "dtype" else value
    assert main(["config", "--json", f"{row.flag}={value}"]) == 0
    shown = {entry["name"]: entry["source"] for entry in json.loads(capsys.readouterr().out)}
    assert {name for name, source in shown.items() if source == "argument"} == {row.name}


@pytest.mark.parametrize(
    ("flags", "value", "source"),
    [
        (["--deterministic"], "true", "argument"),
        (["--no-deterministic"], "false", "argument"),
        (["--deterministic=OFF"], "false", "argument"),
        (["--deterministic=yes"], "true", "argument"),
        (["--deterministic="], "false", "default"),
    ],
)
def test_switch_takes_the_words_of_a_boolean(
    flags: list[str], value: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract 5.2: a switch reads the same words as a variable does; empty is unset."""
    assert main(["config", "--json", *flags]) == 0
    (entry,) = [entry for entry in json.loads(capsys.readouterr().out) if entry["name"] == "deterministic"]
    assert (entry["value"], entry["source"]) == (value, source)


def test_config_table_shows_value_source_and_latch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`expertstream config` shows each setting, its value, its source and when it latches."""
    path = tmp_path / "settings.toml"
    path.write_text('slots = "8GiB"', encoding="utf-8")
    assert main(["config", "--config-file", str(path), "--speculate", "2"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert re.split(r" {2,}", lines["slots"]) == ["slots", f"{2**33} bytes", f"file {path}", "at open"]
    assert re.split(r" {2,}", lines["speculate"]) == ["speculate", "2", "argument", "at open"]
    assert set(lines) == {"setting"} | {row.name for row in ROWS}


def test_config_unknown_variable_is_one_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 5.3: an unknown EXPERTSTREAM_* variable is one warning, on stderr."""
    monkeypatch.setenv("EXPERTSTREAM_SLOT", "8")
    assert main(["config"]) == 0
    assert capsys.readouterr().err.count("EXPERTSTREAM_SLOT;") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["config", "--slots", "5x"], "8GiB"),
        (["config", "--deterministic=maybe"], "yes"),
        (["generate", "model"], "--prompt"),
        (["generate", "model", "--prompt", "a", "--prompt-file", "b"], "either"),
        (["generate", "model", "--prompt-file", "absent.txt"], "absent.txt"),
        (["generate", "model", "--prompt", "a", "--max-tokens", "0"], "max-tokens"),
        (["generate", "model", "--prompt", "a", "--slots", "half"], "from argument"),
        (["generate", "model", "--prompt", "a", "--slot", "1"], "--slots"),
        (["generate"], "MODEL"),
        (["verify", "model", "--policy", "fifo"], "lrfu"),
        (["serve"], "generate"),
    ],
)
def test_usage_wrong_is_code_2_and_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], engine: FakeEngine
) -> None:
    """A wrong use is exit code 2 with one line on stderr that a person can act on, before anything is opened."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("expertstream: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert engine.opened == {}


def test_stdout_closed_before_the_end_is_code_1_without_a_word() -> None:
    """A reader that went away (`| head`) is exit code 1, not a complaint of the interpreter at its exit."""
    code = (
        "import os, sys\nfrom expertstream.scheduler.cli import main\n"
        "read, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\nsys.exit(main(['config']))"
    )
    done = run_python(["-c", code])
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(os.name == "nt", reason="a shell there closes no descriptors")
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_standard_stream_that_is_closed_at_the_start_harms_nothing(closed: tuple[int, ...]) -> None:
    """Started with `>&-` or by a daemon, a command runs: its loop and its files get no descriptor of those three."""
    code = (
        "import os, sys\nfrom expertstream.scheduler import cli\nfrom expertstream.scheduler.commands import one_shot\n"
        "async def work():\n    print('text'); return 5\n"
        "def command(): return one_shot.run_one_shot(work)\n"
        "cli._app = lambda: lambda tokens, **_: command()\n"
        "sys.exit(cli.main())"
    )
    closing = "import os, sys\n" + "".join(f"os.close({number})\n" for number in closed)
    closing += "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    done = run_python(["-c", closing, code])
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout == ("" if 1 in closed else "text\n")
