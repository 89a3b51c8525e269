"""A model folder: which files are used, and how index and headers are reconciled."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import Tensor, tensor, toy_shards, write_checkpoint

from expertstream.memory.checkpoint import Checkpoint
from expertstream.memory.errors import CheckpointError, MissingShardError
from expertstream.memory.reader import FileReader

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3_5-moe"
INDEX = "model.safetensors.index.json"
ONE = {"w": tensor("U8", 4)}


def true_map(shards: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    return {name: shard for shard, tensors in shards.items() for name in tensors}


def test_checkpoint_toy_model_places_every_tensor(tmp_path: Path) -> None:
    """Each tensor of each shard is found, and the bytes at its place are its own."""
    shards = toy_shards()
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "toy", shards, config={"model_type": "toy"})))
    assert checkpoint.path == tmp_path / "toy"
    assert checkpoint.config == {"model_type": "toy"}
    assert checkpoint.generation_config == {}
    assert checkpoint.num_shards == 3
    assert checkpoint.tensors.keys() == true_map(shards).keys()
    assert checkpoint.total_bytes == sum(len(one.payload) for tensors in shards.values() for one in tensors.values())
    assert (checkpoint.absent, checkpoint.unindexed, checkpoint.tokenizer_files) == ({}, (), False)
    for shard, tensors in shards.items():
        for name, one in tensors.items():
            entry = checkpoint.tensor(name)
            assert entry.file == tmp_path / "toy" / shard
            assert entry.file.read_bytes()[entry.offset : entry.offset + entry.nbytes] == one.payload
    assert repr(checkpoint) == f"<Checkpoint toy: 21 tensors, {checkpoint.total_bytes} bytes, 3 shards>"


def test_checkpoint_real_model_opens_whole() -> None:
    """A folder as transformers writes it opens without remainder, and the index's own total agrees."""
    checkpoint = Checkpoint.open(MODEL)
    listed = json.loads((MODEL / INDEX).read_text("utf-8"))
    assert checkpoint.tensors.keys() == listed["weight_map"].keys()
    assert checkpoint.total_bytes == listed["metadata"]["total_size"]
    assert checkpoint.tokenizer_files
    assert checkpoint.generation_config
    assert checkpoint.config["num_experts"] == 32


def test_checkpoint_missing_shards_are_named_in_one_error(tmp_path: Path) -> None:
    """One error names every absent shard and how many tensors each holds, before any header is read."""
    shards = toy_shards(num_shards=4)
    folder = write_checkpoint(tmp_path, shards)
    first, second, third, _ = sorted(shards)
    (folder / second).unlink()
    (folder / third).unlink()
    (folder / first).write_bytes(b"")
    with pytest.raises(MissingShardError) as caught:
        Checkpoint.open(folder)
    assert caught.value.missing == {second: 7, third: 7}
    assert f"'{second}' (7 tensors), '{third}' (7 tensors)" in str(caught.value)
    assert first not in str(caught.value)


def test_checkpoint_dangling_link_is_a_missing_shard(tmp_path: Path) -> None:
    """A link whose blob is gone is an absent shard."""
    folder = write_checkpoint(tmp_path, {"s.safetensors": ONE})
    (folder / "s.safetensors").unlink()
    (folder / "s.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(MissingShardError, match=r"'s.safetensors' \(1 tensor\)"):
        Checkpoint.open(folder)


def test_checkpoint_index_and_headers_disagree_each_case_is_told_apart(tmp_path: Path) -> None:
    """What the index promises and the files lack is an error only for who needs it, and says which case it is."""
    shards = {"1.safetensors": ONE, "2.safetensors": {"v": tensor("U8", 2), "extra.scale": tensor("F32", 1)}}
    weight_map = {"w": "1.safetensors", "v": "1.safetensors", "mtp.fc.weight": "2.safetensors"}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "toy", shards, weight_map=weight_map))
    assert list(checkpoint.tensors) == ["w"]
    assert checkpoint.total_bytes == 4
    assert set(checkpoint.absent) == {"v", "mtp.fc.weight"}
    assert checkpoint.unindexed == ("extra.scale",)
    assert repr(checkpoint) == "<Checkpoint toy: 1 tensors, 4 bytes, 2 shards, 2 absent, 1 unindexed>"
    told = {
        "v": "the index puts it in 1.safetensors, but it is in 2.safetensors",
        "mtp.fc.weight": "the index puts it in 2.safetensors, which does not hold it",
        "extra.scale": "it is in 2.safetensors, but the index does not name it",
        "lm_head.weight": "neither the index nor any of the files names it",
    }
    for name, reason in told.items():
        with pytest.raises(CheckpointError) as caught:
            checkpoint.tensor(name)
        assert caught.value.tensor == name
        assert repr(name) in str(caught.value)
        assert reason in str(caught.value)


def test_checkpoint_index_is_the_authority_over_other_files(tmp_path: Path) -> None:
    """A file that the index does not name is not opened, whatever is in it; of two copies the index's is taken."""
    folder = write_checkpoint(tmp_path, {"a.safetensors": ONE, "b.safetensors": ONE}, weight_map={"w": "b.safetensors"})
    (folder / "a.safetensors").write_bytes(b"junk")
    (folder / "model.safetensors").write_bytes(b"junk")
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.tensor("w").file == folder / "b.safetensors"
    assert checkpoint.num_shards == 1


@pytest.mark.parametrize(
    ("files", "used"),
    [
        (["model.safetensors"], "model.safetensors"),
        (["model.safetensors", "adapter.safetensors"], "model.safetensors"),
        (["weights.safetensors"], "weights.safetensors"),
        (["model-00001-of-00001.safetensors"], "model-00001-of-00001.safetensors"),
    ],
)
def test_checkpoint_without_index_takes_the_one_file(tmp_path: Path, files: list[str], used: str) -> None:
    """Without an index it is model.safetensors, or the only safetensors file there is."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, dict.fromkeys(files, ONE), index=False))
    assert checkpoint.tensor("w").file.name == used
    assert checkpoint.unindexed == ()


@pytest.mark.parametrize("written", ["sub/s.safetensors", "sub\\s.safetensors", "./sub/s.safetensors"])
def test_checkpoint_subfolder_with_either_slash_is_found(tmp_path: Path, written: str) -> None:
    """An index that was written on the other system names the same file."""
    (tmp_path / "sub").mkdir()
    folder = write_checkpoint(tmp_path, {"sub/s.safetensors": ONE}, weight_map={"w": written})
    assert Checkpoint.open(folder).tensor("w").file == folder / "sub" / "s.safetensors"


def test_checkpoint_two_spellings_of_one_file_are_one_shard(tmp_path: Path) -> None:
    """A file is one shard however the index spells it."""
    (tmp_path / "sub").mkdir()
    tensors = {"w": tensor("U8", 4), "v": tensor("U8", 2)}
    weight_map = {"w": "sub/s.safetensors", "v": "sub\\s.safetensors"}
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, {"sub/s.safetensors": tensors}, weight_map=weight_map))
    assert (checkpoint.num_shards, len(checkpoint.tensors)) == (1, 2)


def test_checkpoint_snapshot_of_links_is_opened(tmp_path: Path) -> None:
    """Every file of a hub cache is a link to a blob outside the folder; names stay those of the snapshot."""
    source = write_checkpoint(tmp_path / "source", toy_shards())
    snapshot = tmp_path / "models--toy" / "snapshots" / "abc"
    blobs = tmp_path / "models--toy" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blobs / blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.num_shards == 3
    assert {entry.file.parent for entry in checkpoint.tensors.values()} == {snapshot}


def test_checkpoint_folder_with_any_name_and_byte_order_marks_reads_and_releases(tmp_path: Path) -> None:
    """Non-ASCII, spaced and long folders, a backslash in the index, marked JSON; nothing stays open after close()."""
    folder = tmp_path / "模型 ünï 1 (copy)" / ("long " * 40).strip()
    (folder / "größe").mkdir(parents=True)
    shards = {"größe/s.safetensors": {"w": tensor("BF16", 3, 5, seed=7)}}
    write_checkpoint(folder, shards, weight_map={"w": "größe\\s.safetensors"})
    for name in ("config.json", INDEX):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    checkpoint = Checkpoint.open(folder)
    entry = checkpoint.tensor("w")
    buffer = bytearray(entry.nbytes)
    with FileReader() as reader:
        reader.read_into(entry.file, entry.offset, buffer)
    assert bytes(buffer) == shards["größe/s.safetensors"]["w"].payload
    if Path("/proc/self/fd").exists():
        assert not [fd for fd in Path("/proc/self/fd").iterdir() if "s.safetensors" in os.path.realpath(fd)]
        assert "s.safetensors" not in Path("/proc/self/maps").read_text("utf-8")


def test_checkpoint_read_only_folder_opens_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening and reading a model writes nothing beside it: any attempt would fail here with EROFS."""
    folder = write_checkpoint(tmp_path, toy_shards())
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    real_open, real_file, real_os_open = builtins.open, io.FileIO, os.open

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def only_to_read(real: Callable[..., object]) -> Callable[..., object]:
        def opening(file: str, mode: str = "r", *args: object, **kwargs: object) -> object:
            if set(mode) & set("wax+"):
                refuse()
            return real(file, mode, *args, **kwargs)

        return opening

    def os_open_only_to_read(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()
        return real_os_open(path, flags, *args, **kwargs)

    for module in (builtins, io):  # pathlib opens through io
        monkeypatch.setattr(module, "open", only_to_read(real_open))
    monkeypatch.setattr(io, "FileIO", only_to_read(real_file))
    monkeypatch.setattr(os, "open", os_open_only_to_read)
    for name in ("mkdir", "rename", "replace", "unlink", "symlink", "link", "utime", "chmod"):
        monkeypatch.setattr(os, name, refuse)
    checkpoint = Checkpoint.open(folder)
    with FileReader() as reader:
        for entry in checkpoint.tensors.values():
            assert reader.read_into(entry.file, entry.offset, bytearray(entry.nbytes)) == entry.nbytes
    monkeypatch.undo()
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_checkpoint_every_dtype_streams_its_raw_bytes(tmp_path: Path) -> None:
    """Whatever the dtype, what is read is the slice of the file, and dtype and logical shape are kept beside it."""
    tensors = {
        "experts.0.w": tensor("F8_E4M3", 4, 8, seed=1),
        "experts.0.scale": tensor("F8_E8M0", 4, 1, seed=2),
        "experts.1.w": tensor("BF16", 4, 8, seed=3),
        "experts.2.packed": tensor("I32", 4, 1, seed=4),
        "experts.3.blocks": tensor("U8", 4, 4, seed=5),
        "experts.4.w": tensor("F4", 4, 8, seed=6),
        "dummy": tensor("F32", 0, 8),
        "scalar": tensor("F32", seed=7),
    }
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, {"model.safetensors": tensors}, index=False))
    with FileReader() as reader:
        for name, one in tensors.items():
            entry = checkpoint.tensor(name)
            slot = bytearray(entry.nbytes)
            assert reader.read_into(entry.file, entry.offset, slot) == len(one.payload)
            assert hashlib.sha256(slot).digest() == hashlib.sha256(one.payload).digest()
            assert (entry.dtype, entry.shape) == (one.dtype, one.shape)
    del tensors["dummy"]
    smaller = Checkpoint.open(write_checkpoint(tmp_path / "less", {"model.safetensors": tensors}, index=False))
    assert checkpoint.total_bytes == smaller.total_bytes


def test_checkpoint_config_may_hold_infinity(tmp_path: Path) -> None:
    """Published configurations hold Infinity, which Python's JSON reads."""
    folder = write_checkpoint(tmp_path, {"s.safetensors": ONE}, config={"time_step_limit": [0.0, float("inf")]})
    assert Checkpoint.open(folder).config["time_step_limit"] == [0.0, float("inf")]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model"])
def test_checkpoint_tokenizer_files_are_noticed(tmp_path: Path, name: str) -> None:
    """Any of the usual files counts as a tokenizer."""
    folder = write_checkpoint(tmp_path, {"s.safetensors": ONE})
    (folder / name).write_bytes(b"{}")
    assert Checkpoint.open(folder).tokenizer_files


def test_checkpoint_relative_path_survives_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are found later although the process has moved."""
    write_checkpoint(tmp_path / "toy", {"s.safetensors": ONE})
    monkeypatch.chdir(tmp_path)
    entry = Checkpoint.open("toy").tensor("w")
    monkeypatch.chdir(tmp_path.parent)
    assert entry.file.exists()
