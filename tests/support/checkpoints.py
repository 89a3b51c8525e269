"""Writes tiny safetensors checkpoints by hand: every byte is chosen here, so that a test can also write wrong ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
"""Bits of an element, written down apart from the package's own table so that the two can be compared."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a file holds it: a dtype name, a shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    payload: bytes


def tensor(dtype: str, *shape: int, seed: int = 0) -> Tensor:
    """Makes a tensor of the right size whose bytes depend on the seed only."""
    return Tensor(dtype, shape, Random(seed).randbytes(math.prod(shape) * BITS[dtype] // 8))


def describe(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, object]]:
    """The header entries of tensors that lie one after another."""
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for name, one in tensors.items():
        begin, end = end, end + len(one.payload)
        entries[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [begin, end]}
    return entries


def raw_shard(header: object, payload: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file from parts that need not fit: a header as text, bytes or an object, and a stated length."""
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text.encode() if isinstance(text, str) else text
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + payload


def shard_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A correct safetensors file."""
    entries = describe(tensors)
    header = entries if metadata is None else {"__metadata__": dict(metadata), **entries}
    return raw_shard(header, b"".join(one.payload for one in tensors.values()))


def write_checkpoint(
    folder: Path,
    shards: Mapping[str, Mapping[str, Tensor]],
    *,
    config: Mapping[str, object] | None = None,
    weight_map: Mapping[str, str] | None = None,
    index: bool = True,
) -> Path:
    """Writes a model folder.

    Args:
        folder: made if it is not there.
        shards: the tensors of each file.
        config: config.json; a token one if None.
        weight_map: the index; the true one if None.
        index: whether there is an index at all.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for shard, tensors in shards.items():
        (folder / shard).write_bytes(shard_bytes(tensors, {"format": "pt"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "toy"} if config is None else dict(config)), "utf-8")
    if index:
        true_map = {name: shard for shard, tensors in shards.items() for name in tensors}
        listed = {"metadata": {}, "weight_map": true_map if weight_map is None else dict(weight_map)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(listed), "utf-8")
    return folder


def toy_shards(num_shards: int = 3, num_experts: int = 2) -> dict[str, dict[str, Tensor]]:
    """Shards of a toy MoE: one layer in each, with a router, and experts of one gate, up and down projection."""
    shards: dict[str, dict[str, Tensor]] = {}
    for layer in range(num_shards):
        prefix = f"model.layers.{layer}.mlp"
        tensors = {f"{prefix}.gate.weight": tensor("F32", num_experts, 8, seed=layer)}
        for expert in range(num_experts):
            for part, shape in (("gate_proj", (4, 8)), ("up_proj", (4, 8)), ("down_proj", (8, 4))):
                seed = 1000 * layer + len(tensors)
                tensors[f"{prefix}.experts.{expert}.{part}.weight"] = tensor("BF16", *shape, seed=seed)
        shards[f"model-{layer + 1:05d}-of-{num_shards:05d}.safetensors"] = tensors
    return shards
