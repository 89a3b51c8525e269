"""Experts over slots on an NVIDIA GPU: kernels for a decode step's few rows, grouped products for a prefill's many.

The plain-torch twin is kernels/experts.py. Nothing here waits for the device or goes through the copy engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from . import experts
from .cuda_modules import Kernel, load_kernels, write_words
from .experts import ExpertRows, ExpertShape
from .gates import INTERLEAVED, NONE, UNFUSED, FusedGate, recognise_gate

__all__ = ["MAX_ROWS", "SlotExperts"]

MAX_ROWS = 32
"""Forwards of at most so many rows read weights in kernels of our own; above it tensor cores pay."""

MAX_PAIRS = 384
"""Pairs of one launch, as in expert_rows.cu: its argument stays below the 4 KiB that every driver takes."""

MAX_BLOCKS_Y = 65_535
"""The most blocks that a grid has in y."""

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_Groups = Sequence[tuple[ExpertRows, int]]


class Words(ctypes.Structure):
    """`Words` of expert_rows.cu."""

    _fields_ = (
        ("num_groups", ctypes.c_int),
        ("slot", ctypes.c_int * MAX_PAIRS),
        ("start", ctypes.c_ushort * (MAX_PAIRS + 1)),
        ("pair", ctypes.c_ushort * MAX_PAIRS),
    )


class Task(ctypes.Structure):
    """`Task` of expert_rows.cu."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("words_device", ctypes.c_void_p),
        ("record_bytes", ctypes.c_longlong),
        ("inner", ctypes.c_int),
        ("num_outputs", ctypes.c_int),
        ("row_divisor", ctypes.c_int),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("words", Words),
    )


class Combine(ctypes.Structure):
    """`Combine` of expert_rows.cu."""

    _fields_ = (
        ("pair_outputs", ctypes.c_void_p),
        ("topk_weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("top_k", ctypes.c_int),
        ("num_outputs", ctypes.c_int),
        ("is_float", ctypes.c_int),
    )


class SlotExperts:
    """One layer's experts over its slots. For one thread.

    Args:
        parts: Part name → [num_slots, …] over the layer's slots, device; record after record.
        shape: How the module computes.
        num_experts: Experts of the layer.
    """

    def __init__(self, parts: Mapping[str, torch.Tensor], shape: ExpertShape, num_experts: int) -> None:
        self._parts, self._shape, self._num_experts = parts, shape, num_experts
        up, down = parts[shape.up_name], parts["down_proj"]
        inner, outer = (1, 2) if shape.is_transposed else (2, 1)
        self._device, self._dtype = up.device, up.dtype
        self._num_slots, self._hidden = up.shape[0], up.shape[inner]
        self._up_features, self._down_features = up.shape[outer], down.shape[inner]
        self._gate = recognise_gate(shape, self._up_features, self._down_features, self._dtype)
        self._vector = 16 // self._dtype.itemsize
        self._capability = torch.cuda.get_device_capability(self._device)
        self._row_sizes = (1, 2, 4) if shape.is_transposed else (1, 2, 4, 8)
        self._kernels: dict[str, Kernel] = self._load() if self._has_kernels() else {}
        self._up, self._down = self._task(shape.up_name, self._gate), self._task("down_proj", UNFUSED)
        self._slot_numbers = torch.arange(self._num_slots, dtype=torch.int32, device=self._device)

    @property
    def has_kernels(self) -> bool:
        """Whether decode rows of this layer run in kernels of our own; otherwise in the plain-torch twin."""
        return bool(self._kernels)

    def run(self, hidden: torch.Tensor, topk_ids: torch.Tensor, groups: _Groups, out: torch.Tensor) -> None:
        """Compute experts that are in slots and store each (row, rank) pair's output.

        Which way is taken depends on the number of rows alone, and no output depends on which other experts are in
        `groups`: what was resident never shows.

        Args:
            hidden: [num_rows, hidden], device, of the dtype of the records.
            topk_ids: integers [num_rows, top_k], device: the router's experts.
            groups: (rows of an expert, its slot). Above `MAX_ROWS` rows only the number of pairs is looked at.
            out: [num_rows × top_k, hidden], device, contiguous; written at the pairs of `groups` only.

        Stream:
            Everything is enqueued on torch's current stream; the host waits for nothing.
        """
        if not groups:
            return
        if hidden.shape[0] > MAX_ROWS:
            self._run_grouped(hidden, topk_ids, groups, out)
        elif self._kernels:
            self._run_rows(_aligned(hidden), topk_ids.shape[1], groups, out)
        else:
            experts.run_experts(hidden, topk_ids.shape[1], groups, self._parts, self._shape, out)

    def combine(self, pair_outputs: torch.Tensor, topk_weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Weigh and sum each row's expert outputs in the router's order; see `experts.combine`."""
        num_rows, top_k = topk_weights.shape
        weights_fit = topk_weights.dtype in (torch.float32, dtype)
        if not self._kernels or dtype != self._dtype or pair_outputs.dtype != dtype or not weights_fit:
            return experts.combine(pair_outputs, topk_weights, dtype)
        out = torch.empty((num_rows, self._hidden), dtype=dtype, device=self._device)
        weights = topk_weights.contiguous()
        task = Combine(top_k=top_k, num_outputs=self._hidden, is_float=weights.dtype == torch.float32)
        row_bytes = self._hidden * self._dtype.itemsize
        for first in range(0, num_rows, MAX_BLOCKS_Y):
            task.pair_outputs = pair_outputs.data_ptr() + first * top_k * row_bytes
            task.topk_weights = weights.data_ptr() + first * top_k * weights.element_size()
            task.out = out.data_ptr() + first * row_bytes
            grid = (-(-self._hidden // (128 * self._vector)), min(num_rows - first, MAX_BLOCKS_Y))
            self._kernels["combine"].launch(grid, 128, task, self._stream)
        return out

    def _run_rows(self, hidden: torch.Tensor, top_k: int, groups: _Groups, out: torch.Tensor) -> None:
        outputs = self._down_features if self._gate.is_fused else self._up_features
        up = torch.empty((hidden.shape[0] * top_k, outputs), dtype=self._dtype, device=self._device)
        for part in _launches(groups):
            widest = _fill(self._up.words, part)
            ctypes.memmove(ctypes.addressof(self._down.words), ctypes.addressof(self._up.words), ctypes.sizeof(Words))
            self._up.row_divisor, self._down.row_divisor = top_k, 1
            self._multiply("up", self._up, self._gate.gate, widest, hidden, up)
            # Rows of experts that are not in this launch are computed from whatever is there, and never read.
            x = up if self._gate.is_fused else self._shape.activate(up).contiguous()
            self._multiply("down", self._down, NONE, widest, x, out)

    def _multiply(self, name: str, task: Task, gate: int, widest: int, x: torch.Tensor, out: torch.Tensor) -> None:
        task.x, task.out = x.data_ptr(), out.data_ptr()
        rows = next((size for size in self._row_sizes if size >= widest), self._row_sizes[-1])
        if self._shape.is_transposed:  # a tile is 128 bytes of a weight row
            num_threads, tile = 256, 8 * self._vector // (2 if gate == INTERLEAVED else 1)
        else:  # four warps of four weight rows
            num_threads, tile = 128, 16 // (2 if gate else 1)
        grid = (-(-task.num_outputs // tile), task.words.num_groups)
        self._kernels[f"{name}_{rows}"].launch(grid, num_threads, task, self._stream)

    def _run_grouped(self, hidden: torch.Tensor, topk_ids: torch.Tensor, groups: _Groups, out: torch.Tensor) -> None:
        slots = [self._num_slots] * self._num_experts  # experts that are not in this batch come last
        for rows, slot in groups:
            slots[rows.expert] = slot
        slot_of = torch.empty(self._num_experts, dtype=torch.int32, device=self._device)
        write_words(slot_of, slots)
        in_order, pairs = slot_of.index_select(0, topk_ids.reshape(-1)).sort(stable=True)
        count = sum(len(rows.pairs) for rows, _ in groups)
        ends = torch.searchsorted(in_order, self._slot_numbers, right=True, out_int32=True)
        in_order, pairs = in_order[:count], pairs[:count]
        sizes = sorted((slot, len(rows.pairs)) for rows, slot in groups)
        x = hidden.index_select(0, pairs // topk_ids.shape[1])
        up = self._grouped(x, self._shape.up_name, ends, in_order, sizes)
        out.index_copy_(0, pairs, self._grouped(self._shape.activate(up), "down_proj", ends, in_order, sizes))

    def _grouped(
        self, x: torch.Tensor, name: str, ends: torch.Tensor, slots: torch.Tensor, sizes: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        weights = self._parts[name] if self._shape.is_transposed else self._parts[name].transpose(1, 2)
        if self._can_group(weights):
            grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
            product: torch.Tensor = grouped_mm(x.contiguous(), weights, offs=ends)
        else:
            product, start = x.new_empty((x.shape[0], weights.shape[2])), 0
            for slot, size in sizes:
                torch.mm(x[start : start + size], weights[slot], out=product[start : start + size])
                start += size
        return product + self._parts[name + "_bias"].index_select(0, slots) if self._shape.has_bias else product

    def _can_group(self, weights: torch.Tensor) -> bool:
        """Elsewhere torch has no grouped product, or one that waits for the device."""
        aligned = all(size % self._vector == 0 for size in weights.shape[1:])
        return self._dtype == torch.bfloat16 and self._capability[0] in (9, 10) and aligned and self._num_slots < 1024

    def _has_kernels(self) -> bool:
        """Whether 16-byte loads reach every weight: rows of them start on 16 bytes."""
        sizes = (self._hidden, self._up_features, self._down_features)
        return self._dtype in _DTYPES and self._capability >= (8, 0) and all(size % self._vector == 0 for size in sizes)

    def _load(self) -> dict[str, Kernel]:
        names = [f"{name}_{rows}" for name in ("up", "down") for rows in self._row_sizes] + ["combine"]
        return load_kernels("expert_rows.cu", names, defines(self._dtype, self._gate, self._shape), self._device.index)

    def _task(self, name: str, gate: FusedGate) -> Task:
        weights, is_up = self._parts[name], name != "down_proj"
        biases = self._parts[name + "_bias"].data_ptr() if self._shape.has_bias else None
        up_outputs = self._down_features if gate.is_fused else self._up_features
        return Task(
            weights=weights.data_ptr(),
            biases=biases,
            record_bytes=weights.stride(0) * self._dtype.itemsize,
            inner=self._hidden if is_up else self._down_features,
            num_outputs=up_outputs if is_up else self._hidden,
            limit=gate.limit,
            alpha=gate.alpha,
        )

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def __repr__(self) -> str:
        way = "kernels" if self._kernels else "plain torch"
        return f"<SlotExperts {self._num_slots} slots of {self._dtype}: decode rows by {way}>"


def defines(dtype: torch.dtype, gate: FusedGate, shape: ExpertShape) -> dict[str, int]:
    """Return the macros that expert_rows.cu is compiled with."""
    return {
        "DTYPE": _DTYPES[dtype],
        "GATE": gate.gate,
        "ACTIVATION": gate.activation,
        "TRANSPOSED": int(shape.is_transposed),
        "TASK_BYTES": ctypes.sizeof(Task),
    }


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return rows that 16-byte loads can read."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def _fill(words: Words, groups: _Groups) -> int:
    """Write groups into the words of a launch; return the number of rows of the widest."""
    pairs = [pair for rows, _ in groups for pair in rows.pairs]
    starts = [0]
    for rows, _ in groups:
        starts.append(starts[-1] + len(rows.pairs))
    words.num_groups = len(groups)
    words.slot[: len(groups)] = [slot for _, slot in groups]
    words.start[: len(starts)] = starts
    words.pair[: len(pairs)] = pairs
    return max(len(rows.pairs) for rows, _ in groups)


def _launches(groups: _Groups) -> Sequence[_Groups]:
    """Cut groups where a launch would have more pairs than its argument holds."""
    launches: list[list[tuple[ExpertRows, int]]] = []
    room = 0
    for group in groups:
        if not launches or room < len(group[0].pairs):
            launches.append([])
            room = MAX_PAIRS
        launches[-1].append(group)
        room -= len(group[0].pairs)
    return launches
