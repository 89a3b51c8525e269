"""The command line on the real engine and the shipped checkpoint, as child processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import PROMPT, TINY, greedy, tokenizer

SHARD = "model-00002-of-00004.safetensors"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-I", "-m", "expertstream", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=100, encoding="utf-8")


def entries(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def text_of(num_tokens: int) -> str:
    text: str = tokenizer().decode(greedy()[:num_tokens])
    return text


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(folder)), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_generate_from_a_read_only_folder_with_an_unusual_name(tmp_path: Path) -> None:
    """A read-only checkpoint, under a path with spaces and non-ASCII letters, works and stays as it was."""
    folder = tmp_path / "模型 ünï 1 (copy)"
    shutil.copytree(TINY, folder)
    before = listing(folder)
    for path in (*folder.iterdir(), folder):
        path.chmod(path.stat().st_mode & ~0o222)
    log = tmp_path / "log é.jsonl"
    done = run("generate", folder, "--prompt", PROMPT, "--max-tokens", 12, "--slots", "50%", "--log-file", log)
    assert (done.returncode, done.stdout.removesuffix("\n")) == (0, text_of(12)), done.stderr
    assert listing(folder) == before
    final = entries(log)[-1]
    assert final["event"] == "process.final"
    assert final["totals"]["steps"] == 12  # type: ignore[index]


def damage(folder: Path, kind: str) -> None:
    shard = folder / SHARD
    raw = shard.read_bytes()
    if kind == "truncated":
        shard.write_bytes(raw[:-7])
    elif kind == "missing":
        shard.unlink()
    elif kind == "header":
        shard.write_bytes(raw[:8] + b"[" + raw[9:])


@pytest.mark.parametrize(
    ("kind", "words"),
    [("truncated", ["7 missing", "out_proj"]), ("missing", [SHARD, "tensors"]), ("header", [SHARD])],
)
def test_a_damaged_checkpoint_is_one_clear_error_and_exit_code_3(tmp_path: Path, kind: str, words: list[str]) -> None:
    """A truncated shard, a missing shard and a wrong header: one line that names the file, and exit code 3."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    damage(folder, kind)
    log = tmp_path / "log.jsonl"
    done = run("generate", folder, "--prompt", "x", "--log-file", log)
    assert done.returncode == 3
    said = [line for line in done.stderr.splitlines() if line.startswith("expertstream: error: ")]
    assert len(said) == 1
    assert all(word in said[0] for word in words), said
    assert "Traceback" not in done.stderr
    requested, final = entries(log)
    assert (requested["event"], final["event"], final["stores"]) == ("streaming.requested", "process.final", [])
    assert SHARD in str(final["reason"])


def test_verify_passes_and_says_what_it_compared() -> None:
    """`verify` prints a line per comparison and exits 0."""
    done = run("verify", TINY, "--slots", "25%")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok   ") == 4


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this platform")
@pytest.mark.parametrize("when", ["loading", "generating"])
def test_kill_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    """After kill −9 the checkpoint's folder and the temporary folder are as before, and the next run works."""
    folder, scratch = tmp_path / "model", tmp_path / "scratch"
    shutil.copytree(TINY, folder)
    scratch.mkdir()
    before = listing(folder)
    log = tmp_path / "log.jsonl"
    child = subprocess.Popen(
        command("generate", folder, "--prompt", PROMPT, "--max-tokens", 1500, "--log-file", log),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    assert child.stdout is not None
    if when == "loading":
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        child.stdout.read(20)
    child.kill()
    child.wait(30)
    child.stdout.close()
    assert listing(folder) == before
    assert list(scratch.rglob("*")) == []
    assert all(entry["event"] != "process.final" for entry in entries(log))


@pytest.mark.skipif(not hasattr(signal, "SIGTERM") or os.name == "nt", reason="no SIGTERM to a child on this platform")
@pytest.mark.parametrize(
    "arguments", [["generate", TINY, "--prompt", PROMPT, "--max-tokens", "1900"], ["verify", TINY]]
)
def test_sigterm_to_a_command_that_streams_closes_it_and_writes_the_final_record(
    tmp_path: Path, arguments: list[object]
) -> None:
    """Contract 4.4: SIGTERM to any command reaches the one final record; the exit code is 143."""
    log = tmp_path / "log.jsonl"
    child = subprocess.Popen(
        command(*arguments, "--log-file", log), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (log.exists() and "store.built" in log.read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 143, said
    assert [entry["event"] for entry in entries(log)].count("process.final") == 1
    assert "Traceback" not in said
