"""Model folders that cannot be used: each is refused with a message of its own."""

from __future__ import annotations

import builtins
import io
import json
import os
from pathlib import Path

import pytest
from checkpoints import shard_bytes, tensor, toy_shards, write_checkpoint

from expertstream.memory.checkpoint import Checkpoint
from expertstream.memory.errors import CheckpointError, HeaderError, TruncatedShardError

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3_5-moe"
INDEX = "model.safetensors.index.json"
ONE = {"w": tensor("U8", 4)}


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def test_checkpoint_several_files_without_index_are_listed(tmp_path: Path) -> None:
    """Several files and no index are refused, with their names."""
    files = dict.fromkeys(["x.safetensors", "y.safetensors"], ONE)
    assert "x.safetensors, y.safetensors" in refusal(write_checkpoint(tmp_path, files, index=False))


def test_checkpoint_one_part_of_several_without_index_is_refused(tmp_path: Path) -> None:
    """The only file is not the model when its name says that there are more."""
    folder = write_checkpoint(tmp_path, {"model-00002-of-00010.safetensors": ONE}, index=False)
    assert "part 2 of 10" in refusal(folder)


def test_checkpoint_pickles_only_is_told_so_and_nothing_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of pickles gets its own message, with or without a configuration, and no pickle is opened."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    opened: list[str] = []
    real = builtins.open

    def noting(file: str, *args: object, **kwargs: object) -> object:
        opened.append(str(file))
        return real(file, *args, **kwargs)  # type: ignore[call-overload]

    for module in (builtins, io):  # pathlib opens through io
        monkeypatch.setattr(module, "open", noting)
    for _ in range(2):
        message = refusal(tmp_path)
        assert "pickles, which are never opened" in message
        assert "pytorch_model.bin" in message
        (tmp_path / "config.json").write_text("{}", "utf-8")
    assert {Path(file).name for file in opened} == {"config.json"}


def test_checkpoint_index_that_names_a_pickle_is_refused(tmp_path: Path) -> None:
    """The index cannot make a pickle be opened."""
    folder = write_checkpoint(tmp_path, {"s.safetensors": ONE}, weight_map={"w": "pytorch_model.bin"})
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "only *.safetensors files are opened" in refusal(folder)


@pytest.mark.parametrize(
    "shard",
    [
        "../up.safetensors",
        "a/../../up.safetensors",
        "..\\up.safetensors",
        "/etc/abs.safetensors",
        "\\abs.safetensors",
        "C:\\abs.safetensors",
        "C:rel.safetensors",
        "\\\\host\\share\\s.safetensors",
        "a\0.safetensors",
        "",
        ".",
    ],
)
def test_checkpoint_index_file_outside_the_folder_is_refused(tmp_path: Path, shard: str) -> None:
    """A file name in the index stays inside the folder, by the rules of POSIX and of Windows."""
    (tmp_path / "up.safetensors").write_bytes(shard_bytes(ONE))
    folder = write_checkpoint(tmp_path / "toy", {"s.safetensors": ONE}, weight_map={"w": shard})
    message = refusal(folder)
    assert "not inside the folder" in message
    assert INDEX in message


def test_checkpoint_index_file_name_that_no_system_can_encode_is_refused(tmp_path: Path) -> None:
    """A lone surrogate in a file name is an error of ours."""
    folder = write_checkpoint(tmp_path, {"s.safetensors": ONE}, weight_map={"w": "\ud800.safetensors"})
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)


def test_checkpoint_damaged_shard_is_refused_by_its_header(tmp_path: Path) -> None:
    """The header rules hold for every shard of a folder."""
    shards = toy_shards()
    folder = write_checkpoint(tmp_path, shards)
    last = folder / max(shards)
    content = last.read_bytes()
    last.write_bytes(content[:-1])
    with pytest.raises(TruncatedShardError):
        Checkpoint.open(folder)
    last.write_bytes(content + b"\0")
    with pytest.raises(HeaderError, match="1 extra bytes"):
        Checkpoint.open(folder)
    last.unlink()
    last.mkdir()
    with pytest.raises(HeaderError, match="it is a directory"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "empty (0 bytes)"),
        (b'{\n  "a": 1,\n  "b" 2\n}', "line 3, column 7"),
        (b"[1]", "a list where an object is expected"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!doctype html>", "HTML page"),
    ],
)
def test_checkpoint_broken_json_names_file_and_place(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    """A settings file that cannot be used is named, with line and column where its JSON is broken."""
    folder = write_checkpoint(tmp_path, {"s.safetensors": ONE})
    (folder / name).write_bytes(content)
    message = refusal(folder)
    assert str(folder / name) in message
    assert told in message


@pytest.mark.parametrize("listed", [{}, {"weight_map": {}}, {"weight_map": ["w"]}, {"weight_map": {"w": 1}}])
def test_checkpoint_index_without_a_usable_map_is_refused(tmp_path: Path, listed: dict[str, object]) -> None:
    """An index names tensors and files, or it is no index."""
    folder = write_checkpoint(tmp_path, {"s.safetensors": ONE})
    (folder / INDEX).write_text(json.dumps(listed), "utf-8")
    assert "weight_map" in refusal(folder)


def test_checkpoint_path_that_is_no_model_folder_is_told_what_it_is(tmp_path: Path) -> None:
    """Absent, a file, empty, without configuration, unnameable: each has its own message."""
    assert "no such folder" in refusal(tmp_path / "Qwen" / "Qwen3")
    (tmp_path / "model.safetensors").write_bytes(shard_bytes(ONE))
    assert "give the folder that holds it" in refusal(tmp_path / "model.safetensors")
    assert "config.json" in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "no *.safetensors file" in refusal(tmp_path / "empty")
    assert "path cannot be used" in refusal(Path("a\0b"))
    with pytest.raises(ValueError, match="path must name a folder"):
        Checkpoint.open("")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes do not exist here")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "tokenizer.json"])
def test_checkpoint_named_pipe_is_refused_without_waiting_for_a_writer(name: str, tmp_path: Path) -> None:
    """A pipe in the place of any file of a folder is refused before it is opened: opening would wait for ever."""
    folder = write_checkpoint(tmp_path, {"model.safetensors": ONE})
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert "it is a device, a pipe or a socket" in refusal(folder)
