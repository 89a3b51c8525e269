"""Opens a model folder as the Hugging Face hub lays it out: what is in it, where each tensor lies, what is absent."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Self

from .errors import CheckpointError, MissingShardError, shown
from .header import MAX_HEADER_BYTES, Header, TensorEntry, describe_text, parse_object, read_header
from .regular_file import regular_bytes

__all__ = ["Checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_TOKENIZERS = frozenset({"tokenizer.json", "tokenizer_config.json", "tokenizer.model"})


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Checkpoint:
    """A model folder whose files have been checked against each other. It holds no open file, and writes nothing.

    Args:
        path: the folder, absolute; links in it are not resolved.
        config: config.json.
        generation_config: generation_config.json; {} where there is none.
        shards: the safetensors files that hold the tensors.
        tensors: every tensor that can be read, by name.
        absent: every tensor that the index names and its file does not hold, with the reason.
        strays: every tensor that one of the files holds and the index does not name, with the name of that file.
        tokenizer_files: whether the folder has a tokenizer.
    """

    path: Path
    config: dict[str, object]
    generation_config: dict[str, object]
    shards: tuple[Path, ...]
    tensors: Mapping[str, TensorEntry]
    absent: Mapping[str, str]
    strays: Mapping[str, str]
    tokenizer_files: bool

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the configuration, the index and every header of a model folder; of the tensors nothing is read.

        Args:
            path: a folder on this machine. A hub name is not looked up and nothing is downloaded.

        Returns:
            The checkpoint. An index entry without its tensor is no error until `tensor()` asks for it.

        Raises:
            MissingShardError: if the index names files that are not there; one error names them all.
            HeaderError: if a file is no safetensors file or does not fit its header.
            CheckpointError: if the folder, its configuration or its index cannot be used.
            ReadError: if the system cannot open or read a file.
            ValueError: if the path is empty.
        """
        if not os.fspath(path):
            raise ValueError("path must name a folder, and is empty")
        folder = Path(path).absolute()
        names = _listed(folder)
        weight_map = _weight_map(folder, names)
        shards = [_only_shard(folder, names)] if weight_map is None else _indexed_shards(folder, weight_map)
        config = _json_object(folder / "config.json")
        has_generation = "generation_config.json" in names
        generation_config = _json_object(folder / "generation_config.json") if has_generation else {}
        headers = {shard: read_header(folder / shard) for shard in shards}
        tensors, absent, strays = _reconciled(weight_map, headers)
        files = tuple(folder / shard for shard in shards)
        return cls(folder, config, generation_config, files, tensors, absent, strays, _has_tokenizer(folder, names))

    def __repr__(self) -> str:
        counts = f"{len(self.tensors)} tensors, {self.total_bytes} bytes, {self.num_shards} shards"
        left = f", {len(self.absent)} absent, {len(self.strays)} unindexed" if self.absent or self.strays else ""
        return f"<Checkpoint {self.path.name}: {counts}{left}>"

    @property
    def num_shards(self) -> int:
        """Safetensors files that hold the tensors."""
        return len(self.shards)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors that can be read; headers and unindexed tensors are not in it."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def unindexed(self) -> tuple[str, ...]:
        """Names of the tensors that one of the files holds and the index does not name; they are ignored."""
        return tuple(self.strays)

    def tensor(self, name: str) -> TensorEntry:
        """Finds a tensor that the caller cannot do without.

        Args:
            name: its name in the checkpoint.

        Returns:
            Where it lies.

        Raises:
            CheckpointError: if it cannot be read; the message says whether the index does not name it, or names a
                file that does not hold it, and which file holds it instead.
        """
        entry = self.tensors.get(name)
        if entry is not None:
            return entry
        if name in self.absent:
            problem = self.absent[name]
        elif name in self.strays:
            problem = f"it is in {self.strays[name]}, but the index does not name it"
        else:
            problem = "neither the index nor any of the files names it"
        raise CheckpointError(self.path, problem, name)


def _listed(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except FileNotFoundError as exc:
        hint = "there is no such folder (a hub name is not downloaded: give a folder on this machine)"
        raise CheckpointError(folder, hint) from exc
    except NotADirectoryError as exc:
        raise CheckpointError(folder, "it is a file: give the folder that holds it") from exc
    except OSError as exc:
        raise CheckpointError(folder, f"it cannot be listed: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise CheckpointError(folder, f"its path cannot be used: {exc}") from exc


def _json_object(file: Path) -> dict[str, object]:
    try:
        if regular_bytes(file, CheckpointError, "a JSON file") > MAX_HEADER_BYTES:
            raise CheckpointError(file, f"it has over {MAX_HEADER_BYTES} bytes, too many for a file of settings")
        raw = file.read_bytes()
    except FileNotFoundError as exc:
        raise CheckpointError(file, "there is no such file, and a model folder needs it") from exc
    except OSError as exc:
        raise CheckpointError(file, f"it cannot be read: {exc.strerror or exc}") from exc
    if not raw:
        raise CheckpointError(file, "it is empty (0 bytes)")
    if text := describe_text(raw[:512]):
        raise CheckpointError(file, f"it is {text}")
    return parse_object(raw, file)


def _has_tokenizer(folder: Path, names: frozenset[str]) -> bool:
    found = sorted(_TOKENIZERS & names)
    for name in found:
        try:
            regular_bytes(folder / name, CheckpointError, "a tokenizer file")
        except OSError as exc:
            raise CheckpointError(folder / name, f"it cannot be read: {exc.strerror or exc}") from exc
    return bool(found)


def _weight_map(folder: Path, names: frozenset[str]) -> dict[str, str] | None:
    """Where the index puts each tensor, files as paths under the folder with slashes; None where there is no index."""
    if _INDEX not in names:
        return None
    index = folder / _INDEX
    parsed = _json_object(index).get("weight_map")
    if not isinstance(parsed, dict) or not parsed:
        raise CheckpointError(index, f"its weight_map is {shown(parsed)} and not an object that names tensors")
    inside: dict[str, str] = {}
    for name, shard in parsed.items():
        if not isinstance(shard, str):
            raise CheckpointError(index, f"its weight_map has {shown(shard)} and not a file name", name)
        if shard not in inside:
            inside[shard] = _inside(index, shard)
    return {name: inside[shard] for name, shard in parsed.items()}


def _inside(index: Path, shard: str) -> str:
    # Windows rules know both kinds of slash, drives and shares; an index may have been written on either system.
    # What a link in the folder points to may lie elsewhere: that is how the hub's cache is built.
    parts = PureWindowsPath(shard)
    if parts.anchor or ".." in parts.parts or not parts.parts or "\0" in shard:
        raise CheckpointError(index, f"it names the file {shown(shard)}, which is not inside the folder")
    if not shard.endswith(_SUFFIX):
        raise CheckpointError(index, f"it names the file {shown(shard)}, and only *{_SUFFIX} files are opened")
    return "/".join(parts.parts)


def _indexed_shards(folder: Path, weight_map: Mapping[str, str]) -> list[str]:
    num_tensors = Counter(weight_map.values())
    missing = {shard: num_tensors[shard] for shard in sorted(num_tensors) if _is_absent(folder / shard)}
    if missing:
        raise MissingShardError(folder, missing)
    return sorted(num_tensors)


def _is_absent(file: Path) -> bool:
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        # It is there or cannot be: opening it says why it cannot be used.
        return False
    return False


def _only_shard(folder: Path, names: frozenset[str]) -> str:
    shards = sorted(name for name in names if name.endswith(_SUFFIX))
    if _SINGLE in shards:
        return _SINGLE
    if len(shards) > 1:
        problem = f"it has several files and no {_INDEX} to tell which belong together: {', '.join(shards)}"
        raise CheckpointError(folder, problem)
    if not shards:
        raise CheckpointError(folder, _why_no_shards(names))
    part = re.search(r"-0*(\d+)-of-0*(\d+)\.safetensors$", shards[0])
    if part and part[2] != "1":
        problem = f"its only file, {shards[0]}, is part {part[1]} of {part[2]}, and there is no {_INDEX}"
        raise CheckpointError(folder, problem)
    return shards[0]


def _why_no_shards(names: frozenset[str]) -> str:
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        return f"its weights are pickles, which are never opened: convert them to safetensors ({', '.join(pickles)})"
    return f"it holds no *{_SUFFIX} file"


def _reconciled(
    weight_map: Mapping[str, str] | None, headers: Mapping[str, Header]
) -> tuple[dict[str, TensorEntry], dict[str, str], dict[str, str]]:
    held: Sequence[tuple[str, str]] = [(name, shard) for shard, header in headers.items() for name in header.entries]
    if weight_map is None:
        return {name: headers[shard].entries[name] for name, shard in held}, {}, {}
    tensors: dict[str, TensorEntry] = {}
    absent: dict[str, str] = {}
    shard_of = dict(held)
    for name, shard in weight_map.items():
        entry = headers[shard].entries.get(name)
        if entry is not None:
            tensors[name] = entry
        elif name in shard_of:
            absent[name] = f"the index puts it in {shard}, but it is in {shard_of[name]}"
        else:
            absent[name] = f"the index puts it in {shard}, which does not hold it, nor does any other file"
    return tensors, absent, {name: shard for name, shard in held if name not in weight_map}
