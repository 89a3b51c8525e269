"""Builds a model from a checkpoint: transformers' class on the meta device, dense tensors read in, experts found.

No expert tensor is ever allocated as a parameter; their bytes become records (memory/records.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...kernels.experts import ExpertShape
from ...memory.checkpoint import Checkpoint
from ...memory.errors import CheckpointError
from ...memory.header import TensorEntry
from ...memory.reader import FileReader
from ...memory.records import ExpertKey, RecordLayout, RecordSource, pack, torch_dtype
from .errors import NotMixtureOfExpertsError, UnsupportedModelError
from .mtp import MtpHead
from .names import NameMap, map_names, record_sources
from .plugs import ATTENTION, EXPERTS, register

__all__ = ["BuiltModel", "ExpertLayer", "build_model"]

# transformers builds under a default dtype, and torch has one default for the whole process: two at once would build
# with each other's.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One MoE layer: its experts module (on the meta device for ever) and what is known of its experts.

    Attributes:
        number: MoE layer number within the store; those of an MTP head come last.
        name: The experts module's name.
        module: The experts module.
        num_experts: Experts of the layer.
        top_k: Experts per token.
        layout: Record layout.
        shape: How the module computes.
    """

    number: int
    name: str
    module: torch.nn.Module
    num_experts: int
    top_k: int
    layout: RecordLayout
    shape: ExpertShape


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model ready to run once its experts are served.

    Attributes:
        model: The transformers model; dense parameters in place.
        mtp: The checkpoint's MTP head, if asked for.
        dtype: The dtype that runs.
        layers: Its MoE layers.
        sources: Where every expert's bytes are.
        dense_bytes: Bytes of dense parameters and buffers.
        num_ignored: Tensors of the checkpoint that nothing here wants.
    """

    model: PreTrainedModel
    mtp: MtpHead | None
    dtype: torch.dtype
    layers: tuple[ExpertLayer, ...]
    sources: dict[ExpertKey, RecordSource]
    dense_bytes: int
    num_ignored: int


def build_model(
    checkpoint: Checkpoint,
    reader: FileReader,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    with_mtp: bool,
    check_cancelled: Callable[[], None] = lambda: None,
) -> BuiltModel:
    """Build a checkpoint's model.

    Args:
        checkpoint: Opened; headers validated.
        reader: Reads its shards.
        dtype: The dtype that runs; None is the checkpoint's own.
        device: Where dense parameters go.
        with_mtp: Assemble the MTP head of the `mtp.*` tensors as well.
        check_cancelled: Raises when the opening was cancelled; called before every dense tensor is read.

    Raises:
        CheckpointError: When a needed tensor is absent, of the wrong shape or unreadable.
        NotMixtureOfExpertsError: When there are no routed experts.
        UnsupportedModelError: When the model's class or layout is not supported.
    """
    register()
    config = _read_config(checkpoint)
    run_dtype = dtype or _config_dtype(checkpoint, config)
    with _taken_by_transformers(checkpoint), _one_at_a_time, torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=run_dtype,
            attn_implementation=ATTENTION,
            experts_implementation=EXPERTS,
            trust_remote_code=False,
        )
        mtp = MtpHead.build(model, checkpoint, run_dtype) if with_mtp else None
    roots: list[tuple[str, torch.nn.Module]] = [("", model)] + ([("mtp.", mtp)] if mtp is not None else [])
    modules = {prefix + name: m for prefix, root in roots for name, m in _experts_modules(root)}
    if not modules:
        raise NotMixtureOfExpertsError(
            checkpoint.path, f"{config.model_type} has no routed experts that can be streamed"
        )
    expert_parameters = {
        f"{name}.{p}": name for name, m in modules.items() for p, _ in m.named_parameters(recurse=False)
    }
    tensors = {prefix + n: t for prefix, root in roots for n, t in root.state_dict(keep_vars=True).items()}
    names = map_names(checkpoint, model, tensors, expert_parameters)
    layers, sources = _expert_layers(checkpoint, config, modules, names, run_dtype)
    dense = {name: tensor for name, tensor in tensors.items() if name not in expert_parameters}
    dense_bytes = _load_dense(checkpoint, reader, roots, dense, names, device, check_cancelled)
    model.train(False)
    return BuiltModel(model, mtp, run_dtype, layers, sources, dense_bytes, len(names.ignored))


def _read_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    with _taken_by_transformers(checkpoint):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            checkpoint.path, trust_remote_code=False, local_files_only=True
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            checkpoint.path / "config.json", "it is quantized; quantized experts are not supported"
        )
    return config


@contextmanager
def _taken_by_transformers(checkpoint: Checkpoint) -> Iterator[None]:
    """Blame config.json for what transformers raises over its values: a wrong one ends as an error of any class."""
    try:
        yield
    except (CheckpointError, ImportError, MemoryError):
        raise
    except Exception as exc:
        problem = f"transformers does not take it: {type(exc).__name__}: {exc}"
        raise UnsupportedModelError(checkpoint.path / "config.json", problem) from exc


def _config_dtype(checkpoint: Checkpoint, config: PreTrainedConfig) -> torch.dtype:
    dtype = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        problem = f"its dtype {dtype!r} is no floating dtype of torch"
        raise UnsupportedModelError(checkpoint.path / "config.json", problem)
    return found


def _experts_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Find the modules that transformers' decorator made pluggable; its flags are what says how they compute."""
    for name, module in root.named_modules():
        if hasattr(module, "is_concatenated") and hasattr(module, "is_transposed"):
            yield name, module


def _expert_layers(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    modules: dict[str, torch.nn.Module],
    names: NameMap,
    dtype: torch.dtype,
) -> tuple[tuple[ExpertLayer, ...], dict[ExpertKey, RecordSource]]:
    layers: list[ExpertLayer] = []
    sources: dict[ExpertKey, RecordSource] = {}
    top_k = _top_k(checkpoint, config)
    for number, (name, module) in enumerate(modules.items()):
        parameters = dict(module.named_parameters(recurse=False))
        num_experts = int(module.num_experts)  # type: ignore[arg-type]
        if top_k > num_experts:
            problem = f"a token uses {top_k} experts and {name} has {num_experts}"
            raise UnsupportedModelError(checkpoint.path / "config.json", problem)
        odd = [p for p, t in parameters.items() if t.shape[0] != num_experts]
        if getattr(module, "has_post_expert_norm", False) or odd or list(module.children()) != _activations(module):
            extra = ", ".join(odd) or "a norm or a submodule"
            problem = f"{type(module).__name__} has more than plain expert weights ({extra})"
            raise UnsupportedModelError(checkpoint.path, problem, name)
        layout = pack({p: tuple(t.shape[1:]) for p, t in parameters.items()}, dtype)
        layers.append(ExpertLayer(number, name, module, num_experts, top_k, layout, _shape_of(module)))
        sources |= record_sources(number, num_experts, layout, names.experts.get(name, ()), name, checkpoint)
    return tuple(layers), sources


def _activations(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Children without parameters are activation functions; they run as they are."""
    return [child for child in module.children() if not list(child.parameters())]


def _shape_of(module: torch.nn.Module) -> ExpertShape:
    gated = bool(module.has_gate)
    return ExpertShape(
        up_name="gate_up_proj" if gated else "up_proj",
        is_transposed=bool(module.is_transposed),
        has_bias=bool(module.has_bias),
        activate=module._apply_gate if gated else module.act_fn,  # type: ignore[arg-type]
    )


def _top_k(checkpoint: Checkpoint, config: PreTrainedConfig) -> int:
    text = config.get_text_config()
    for key in ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModelError(checkpoint.path / "config.json", "it does not say how many experts a token uses")


def _load_dense(
    checkpoint: Checkpoint,
    reader: FileReader,
    roots: list[tuple[str, torch.nn.Module]],
    dense: dict[str, torch.Tensor],
    names: NameMap,
    device: torch.device,
    check_cancelled: Callable[[], None],
) -> int:
    tied = _tied_names(roots[0][1], names)
    missing = [name for name in dense if name not in names.dense and name not in tied]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise UnsupportedModelError(
            checkpoint.path, f"the checkpoint has no tensor for {len(missing)} parameters: {shown}"
        )
    total = 0
    for prefix, root in roots:
        for name, tensor in dense.items():
            if not name.startswith(prefix) or (prefix == "" and any(name.startswith(p) for p, _ in roots if p)):
                continue
            if name in names.dense:
                check_cancelled()
                value = _read_tensor(reader, names.dense[name], tensor).to(device)
                total += value.numel() * value.element_size()
                _put(root, name.removeprefix(prefix), value)
        _fill_buffers(roots[0][1], root, device)
    for name, source in tied.items():
        _put(roots[0][1], name, roots[0][1].get_parameter(source).data)
    return total


def _tied_names(model: Any, names: NameMap) -> dict[str, str]:
    """Return tied parameter → the parameter it aliases. What is in the file decides: a head that is there is used."""
    configs = (model.config, model.config.get_text_config())
    if not any(getattr(config, "tie_word_embeddings", False) for config in configs):
        return {}
    keys = getattr(model, "_tied_weights_keys", None) or {}
    return {name: source for name, source in keys.items() if name not in names.dense and source in names.dense}


def _read_tensor(reader: FileReader, entry: TensorEntry, wanted: torch.Tensor) -> torch.Tensor:
    dtype = torch_dtype(entry.dtype)
    if dtype is None:
        raise UnsupportedModelError(entry.file, f"its dtype {entry.dtype} has no plain torch dtype", entry.name)
    if tuple(entry.shape) != tuple(wanted.shape):
        problem = f"its shape is {list(entry.shape)}; the model wants {list(wanted.shape)}"
        raise UnsupportedModelError(entry.file, problem, entry.name)
    raw = torch.empty(entry.nbytes, dtype=torch.uint8)
    reader.read_into(entry.file, entry.offset, raw.numpy().data)
    return raw.view(dtype).reshape(entry.shape).to(wanted.dtype)


def _put(root: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = root.get_submodule(owner_name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = torch.nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def _fill_buffers(model: torch.nn.Module, root: torch.nn.Module, device: torch.device) -> None:
    """Give modules whose buffers are still on the meta device (rotary tables) transformers' own values."""
    for module in root.modules():
        empty = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if empty:
            for name in empty:
                module._buffers[name] = torch.empty_like(module._buffers[name], device=device)  # type: ignore[arg-type]
            model._init_weights(module)  # type: ignore[operator]
