"""`expertstream generate`: text, messages and signals, and one run of the real thing."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from environment import child_variables, run_python
from fake_engine import FakeEngine
from source_checks import checkout

from expertstream.scheduler.cli import main
from expertstream.scheduler.commands import one_shot

MODEL = checkout() / "tests" / "models" / "tiny-qwen3_5-moe"


def test_generate_writes_text_to_stdout_and_nothing_else(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract 4.2: results go to stdout; the settings given, and stderr as the place of entries, reach the engine."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("häl", encoding="utf-8")
    flags = ["--max-tokens", "3", "--slots", "50%", "--no-deterministic"]
    assert main(["generate", str(MODEL), "--prompt-file", str(prompt), *flags]) == 0
    assert capsys.readouterr() == ("one twö\n", "")
    assert engine.asked == {"prompt": "häl", "max_tokens": 3}
    stream, progress = engine.opened.pop("log_stream"), engine.opened.pop("progress")
    assert stream is not None
    assert progress is None, "no bar where stderr is no terminal"
    assert engine.opened == {"path": MODEL, "slots": "50%", "deterministic": False}
    assert engine.closed == 1


def test_generate_chat_is_one_message_of_a_user(engine: FakeEngine, tmp_path: Path) -> None:
    """--chat gives the prompt as a message; a configuration file is handed on to the engine."""
    path = tmp_path / "settings.toml"
    path.write_text("speculate = 1", encoding="utf-8")
    assert main(["generate", str(MODEL), "--prompt", "a", "--chat", "--config-file", str(path)]) == 0
    assert engine.asked["prompt"] == [{"role": "user", "content": "a"}]
    assert engine.opened["config_file"] == path
    path.write_text("speculation = 1", encoding="utf-8")
    assert main(["generate", str(MODEL), "--prompt", "a", "--config-file", str(path)]) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "no add_signal_handler"])
def test_generate_signal_closes_the_engine_and_is_the_exit_code(
    number: signal.Signals, code: int, loop: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 4.4, 5.5: Ctrl-C and SIGTERM close the engine, also where add_signal_handler does not exist."""
    if loop != "uvloop":
        monkeypatch.setattr(one_shot, "_has_uvloop", lambda: False)
    else:
        pytest.importorskip("uvloop")
    if loop == "no add_signal_handler":
        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", _refuse)

    async def signalled() -> None:
        signal.raise_signal(number)
        signal.raise_signal(number)  # an impatient second one must not interrupt the close
        await asyncio.sleep(60)

    engine.then = signalled
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert main(["generate", str(MODEL), "--prompt", "a"]) == code
    assert engine.closed == 1
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def _refuse(*arguments: object) -> None:
    raise NotImplementedError


def test_generate_without_uvloop_runs(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 6.1: uvloop is used only where it exists."""
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert main(["generate", str(MODEL), "--prompt", "a"]) == 0


def test_generate_stdout_closed_is_code_1_and_closes(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reader that went away (`| head`) ends the command without a word, and the engine is closed."""

    def broken(text: str) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(sys.stdout, "write", broken)
    assert main(["generate", str(MODEL), "--prompt", "a"]) == 1
    assert engine.closed == 1
    assert capfd.readouterr().err == ""


def test_generate_of_the_test_model_prints_text_and_the_final_record() -> None:
    """Contract 4.2, 4.4: text on stdout; entries on stderr, of which the last is the one process.final."""
    flags = ["--prompt", "The ", "--max-tokens", "4", "--slots", "50%", "--device", "cpu"]
    done = run_python(["-m", "expertstream", "generate", str(MODEL), *flags])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert [entry["event"] for entry in entries].count("process.final") == 1
    assert entries[-1]["event"] == "process.final"
    assert entries[-1]["totals"]["steps"] > 0


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM there ends a process without asking it")
def test_generate_stopped_by_sigterm_in_the_middle_prints_the_final_record() -> None:
    """Contract 4.4: SIGTERM to a command reaches process.final, after the engine has been closed."""
    flags = ["--prompt", "The ", "--max-tokens", "2000", "--device", "cpu", "--stats-every", "0"]
    command = [sys.executable, "-P", "-m", "expertstream", "generate", str(MODEL), *flags]
    with subprocess.Popen(command, env=child_variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)  # the first character: a step has ended, and many are to come
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 143
    events = [json.loads(line)["event"] for line in err.decode().splitlines()]
    assert events == ["streaming.requested", "store.built", "store.closed", "process.final"]
