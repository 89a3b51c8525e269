"""From checkpoint names to parameters and expert records, by transformers' own conversion mapping, names only.

No tensor is read here. `get_model_conversion_mapping` and `rename_source_key` are internal to transformers:
tests/steps/model/test_build.py builds models through them, and no test pins them by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key

from ...memory.checkpoint import Checkpoint
from ...memory.header import TensorEntry
from ...memory.records import ExpertKey, Piece, RecordLayout, RecordSource, torch_dtype
from .errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ExpertSource", "NameMap", "map_names", "record_sources"]


@dataclass(frozen=True, slots=True)
class ExpertSource:
    """One checkpoint tensor that holds bytes of experts.

    Attributes:
        entry: The tensor.
        part: Which part of the record it fills, by parameter name.
        expert: The expert, or None when the tensor holds all of them along its first dimension.
        order: Its place among the tensors that are concatenated into the part (gate before up).
    """

    entry: TensorEntry
    part: str
    expert: int | None
    order: int


@dataclass(slots=True)
class NameMap:
    """Where every tensor of a checkpoint goes.

    Attributes:
        dense: Parameter or buffer name → tensor.
        experts: Experts module name → the tensors that hold its bytes.
        ignored: Tensors that no parameter of this model wants (an MTP head that is off, a vision tower).
    """

    dense: dict[str, TensorEntry] = field(default_factory=dict)
    experts: dict[str, list[ExpertSource]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)


def map_names(
    checkpoint: Checkpoint, model: PreTrainedModel, wanted: Iterable[str], expert_parameters: Mapping[str, str]
) -> NameMap:
    """Map the checkpoint's tensor names onto a model's parameters.

    Args:
        checkpoint: Headers are enough.
        model: On the meta device; supplies the mapping. `wanted` may name parameters of a module beside it.
        wanted: Names of all parameters and persistent buffers to be filled.
        expert_parameters: Of those, the experts modules' parameters → name of their module.

    Raises:
        UnsupportedModelError: When a wanted tensor needs a conversion that cannot be done while copying bytes.
    """
    transforms = get_model_conversion_mapping(model)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings: list[Any] = [t for t in transforms if not isinstance(t, WeightConverter)]
    by_pattern: dict[str, WeightConverter] = {p: c for c in converters for p in c.source_patterns}
    names = dict.fromkeys(wanted, True)
    result = NameMap()
    for name, entry in checkpoint.tensors.items():
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
        if target in expert_parameters:
            source = _expert_source(entry, target, pattern, by_pattern)
            result.experts.setdefault(expert_parameters[target], []).append(source)
        elif target not in names:
            result.ignored.append(name)
        elif pattern is not None:
            problem = f"it needs a conversion that is not done while reading: {by_pattern[pattern].operations}"
            raise UnsupportedModelError(checkpoint.path, problem, name)
        else:
            result.dense[target] = entry
    return result


def _expert_source(entry: TensorEntry, target: str, pattern: str | None, by_pattern: Mapping[str, Any]) -> ExpertSource:
    part = target.rpartition(".")[2]
    if pattern is None:
        return ExpertSource(entry, part, None, 0)
    converter = by_pattern[pattern]
    merges = [op for op in converter.operations if isinstance(op, MergeModulelist) and op.dim == 0]
    joins = [op for op in converter.operations if isinstance(op, Concatenate) and op.dim == 1]
    # Expert by expert, then gate and up along the output features: both are plain runs of bytes within a record.
    if len(merges) != 1 or len(merges) + len(joins) != len(converter.operations):
        problem = f"it needs a conversion of experts that is not done while reading: {converter.operations}"
        raise UnsupportedModelError(entry.file, problem, entry.name)
    number = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), entry.name)
    if number is None:
        raise UnsupportedModelError(entry.file, f"its name has no expert number where {pattern!r} has *", entry.name)
    return ExpertSource(entry, part, int(number[1]), converter.source_patterns.index(pattern))


def record_sources(
    layer: int,
    num_experts: int,
    layout: RecordLayout,
    sources: Iterable[ExpertSource],
    module: str,
    checkpoint: Checkpoint,
) -> dict[ExpertKey, RecordSource]:
    """Find the bytes of every expert of one layer. Every part of every expert must come from the files, exactly once.

    Raises:
        UnsupportedModelError: When a tensor is missing, has the wrong shape, or has a dtype that torch cannot convert.
    """
    pieces: dict[tuple[int, str], list[tuple[int, Piece]]] = {}
    shapes = {part.name: part.shape for part in layout.parts}
    for source in sources:
        for expert, piece in _pieces(source, num_experts, shapes[source.part]):
            pieces.setdefault((expert, source.part), []).append((source.order, piece))
    records: dict[ExpertKey, RecordSource] = {}
    for expert in range(num_experts):
        placed: list[Piece] = []
        for part in layout.parts:
            found = sorted(pieces.get((expert, part.name), []), key=lambda item: item[0])
            elements = sum(piece.num_elements for _, piece in found)
            wanted = part.num_bytes // layout.dtype.itemsize
            if elements != wanted:
                problem = (
                    f"expert {expert} has {elements} of {wanted} elements, in {len(found)} tensors of the checkpoint"
                )
                raise UnsupportedModelError(checkpoint.path, problem, f"{module}.{part.name}")
            offset = part.offset
            for _, piece in found:
                placed.append(Piece(piece.file, piece.offset, piece.num_bytes, piece.dtype, offset))
                offset += piece.num_elements * layout.dtype.itemsize
        records[ExpertKey(layer, expert)] = RecordSource(tuple(placed))
    return records


def _pieces(source: ExpertSource, num_experts: int, shape: tuple[int, ...]) -> Iterable[tuple[int, Piece]]:
    entry = source.entry
    dtype = torch_dtype(entry.dtype)
    if dtype is None or not dtype.is_floating_point:
        problem = f"its dtype is {entry.dtype}; experts are read from F64, F32, F16 and BF16"
        raise UnsupportedModelError(entry.file, problem, entry.name)
    if source.expert is not None:
        if entry.shape[1:] != shape[1:]:
            raise _wrong_shape(entry, ("…", *shape[1:]))
        return [(source.expert, Piece(entry.file, entry.offset, entry.nbytes, dtype, 0))]
    if entry.shape != (num_experts, *shape):
        raise _wrong_shape(entry, (num_experts, *shape))
    size = entry.nbytes // num_experts
    return [(e, Piece(entry.file, entry.offset + e * size, size, dtype, 0)) for e in range(num_experts)]


def _wrong_shape(entry: TensorEntry, wanted: tuple[object, ...]) -> UnsupportedModelError:
    return UnsupportedModelError(
        entry.file, f"its shape is {list(entry.shape)}; the model wants {list(wanted)}", entry.name
    )
