"""Building a model: every tensor finds its place or opening fails with its name; expert bytes are never parameters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from safetensors.torch import load_file, save_file
from tiny import NUM_EXPERTS, NUM_LAYERS, TINY, TOP_K

from expertstream.memory.checkpoint import Checkpoint
from expertstream.memory.errors import CheckpointError
from expertstream.memory.reader import FileReader
from expertstream.steps.model.build import BuiltModel, build_model
from expertstream.steps.model.errors import NotMixtureOfExpertsError, UnsupportedModelError

Tensors = dict[str, torch.Tensor]


def build(path: Path, **options: Any) -> BuiltModel:
    with FileReader() as reader:
        settings = {"dtype": torch.float32, "device": torch.device("cpu"), "with_mtp": False, **options}
        return build_model(Checkpoint.open(path), reader, **settings)


def rewrite(folder: Path, change: Callable[[Tensors], None], **config: object) -> Path:
    """Write a one-file copy of the shipped checkpoint with its tensors or config changed."""
    tensors: Tensors = {}
    for shard in sorted(TINY.glob("*.safetensors")):
        tensors |= load_file(shard)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    parsed = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**parsed, **config}), encoding="utf-8")
    return folder


def test_shipped_checkpoint_has_its_layers_and_no_expert_parameter() -> None:
    """Every expert of every layer has a source; the experts modules stay on the meta device."""
    built = build(TINY, with_mtp=True)
    assert [layer.number for layer in built.layers] == list(range(NUM_LAYERS + 1))
    assert {(layer.num_experts, layer.top_k) for layer in built.layers} == {(NUM_EXPERTS, TOP_K)}
    assert len(built.sources) == (NUM_LAYERS + 1) * NUM_EXPERTS
    for layer in built.layers:
        assert all(parameter.is_meta for parameter in layer.module.parameters())
    dense = [p for n, p in built.model.named_parameters() if ".experts." not in n]
    assert not any(parameter.is_meta for parameter in dense)
    assert not any(buffer.is_meta for buffer in built.model.buffers())
    assert built.num_ignored == 0


def test_mtp_tensors_are_ignored_and_counted_when_speculation_is_off() -> None:
    """A tensor that nothing wants is no error, and is counted."""
    built = build(TINY)
    assert built.mtp is None
    assert built.num_ignored == sum(name.startswith("mtp.") for name in Checkpoint.open(TINY).tensors)


def test_a_missing_expert_tensor_is_refused_by_name(tmp_path: Path) -> None:
    """Every part of every expert comes from the files, or opening fails with the part, the expert and the counts."""

    def drop(tensors: Tensors) -> None:
        del tensors["mtp.layers.0.mlp.experts.7.up_proj.weight"]

    with pytest.raises(
        UnsupportedModelError, match=r"mtp\.layers\.0\.mlp\.experts\.gate_up_proj.*expert 7 has 6144 of 12288"
    ):
        build(rewrite(tmp_path, drop), with_mtp=True)


def test_a_renamed_expert_tensor_is_refused(tmp_path: Path) -> None:
    """A name that maps to nothing leaves a hole, and the hole is named."""

    def rename(tensors: Tensors) -> None:
        tensors["model.language_model.layers.2.mlp.experts.gate_up_projection"] = tensors.pop(
            "model.language_model.layers.2.mlp.experts.gate_up_proj"
        )

    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.2\.mlp\.experts\.gate_up_proj.*expert 0 has 0 of"):
        build(rewrite(tmp_path, rename))


def test_a_missing_dense_tensor_is_refused_by_name(tmp_path: Path) -> None:
    """A parameter without a tensor is an error that counts and names it."""
    with pytest.raises(CheckpointError, match=r"no tensor for 1 parameters: model\.norm\.weight"):
        build(rewrite(tmp_path, lambda tensors: tensors.__delitem__("model.language_model.norm.weight")))


def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    """Shapes are compared with the model's, for dense tensors and for experts."""

    def cut(name: str) -> Callable[[Tensors], None]:
        return lambda tensors: tensors.update({name: tensors[name][..., :-1]})

    with pytest.raises(UnsupportedModelError, match=r"norm.*\[127\].*\[128\]"):
        build(rewrite(tmp_path, cut("model.language_model.norm.weight")))
    with pytest.raises(UnsupportedModelError, match=r"down_proj.*\[32, 128, 47\].*\[32, 128, 48\]"):
        build(rewrite(tmp_path, cut("model.language_model.layers.0.mlp.experts.down_proj")))


@pytest.mark.parametrize(
    ("tied", "has_head", "outcome"),
    [(True, True, "own"), (True, False, "alias"), (False, True, "own"), (False, False, "error")],
)
def test_what_is_in_the_file_decides_about_a_tied_head(
    tmp_path: Path, tied: bool, has_head: bool, outcome: str
) -> None:
    """A head in the file is used; an absent one is the embedding where the config ties them, and an error otherwise."""

    def change(tensors: Tensors) -> None:
        if not has_head:
            del tensors["lm_head.weight"]

    rewrite(tmp_path, change, tie_word_embeddings=tied)
    if outcome == "error":
        with pytest.raises(CheckpointError, match="lm_head"):
            build(tmp_path)
        return
    model: Any = build(tmp_path).model
    is_alias = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert is_alias == (outcome == "alias")


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    """A dense model has nothing to stream, and the error says so."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(NotMixtureOfExpertsError, match="llama has no routed experts"):
        build(tmp_path)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    """Quantized experts are not supported, and the error says so."""
    rewrite(tmp_path, lambda tensors: None, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match="quantized"):
        build(tmp_path)


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    """A folder with code of its own: the code is not imported, whatever config.json says."""
    shutil.copytree(TINY, tmp_path / "model")
    folder = tmp_path / "model"
    trap = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nraise SystemExit('remote code ran')\n"
    (folder / "configuration_trap.py").write_text(trap, encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").chmod(0o644)
    auto_map = {"AutoConfig": "configuration_trap.TrapConfig", "AutoModelForCausalLM": "configuration_trap.Trap"}
    config |= {"auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    build(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "trap"}), encoding="utf-8")
    with pytest.raises(UnsupportedModelError):
        build(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("form", ["fused", "per expert", "mixed"])
def test_expert_bytes_are_the_same_whatever_form_they_are_stored_in(tmp_path: Path, form: str) -> None:
    """Fused, expert by expert and mixed checkpoints give the same record bytes."""

    def split(tensors: Tensors) -> None:
        for number in range(NUM_LAYERS):
            if form == "fused" or (form == "mixed" and number == 0):
                continue
            prefix = f"model.language_model.layers.{number}.mlp.experts."
            gate_up, down = tensors.pop(prefix + "gate_up_proj"), tensors.pop(prefix + "down_proj")
            for expert in range(NUM_EXPERTS):
                gate, up = gate_up[expert].chunk(2)
                tensors[f"{prefix}{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{prefix}{expert}.up_proj.weight"] = up.clone()
                tensors[f"{prefix}{expert}.down_proj.weight"] = down[expert].clone()

    folder = rewrite(tmp_path, split)
    assert _record_bytes(folder) == _record_bytes(TINY)


def _record_bytes(folder: Path) -> list[bytes]:
    built = build(folder, dtype=torch.bfloat16)
    records = []
    with FileReader() as reader:
        for source in built.sources.values():
            record = bytearray(built.layers[0].layout.num_bytes)
            for piece in source.pieces:
                reader.read_into(piece.file, piece.offset, memoryview(record)[piece.record_offset :][: piece.num_bytes])
            records.append(bytes(record))
    return records


def test_nested_config_and_outer_prefix_are_read(tmp_path: Path) -> None:
    """A multimodal config nests the text model's; its text tensors are found under either prefix."""
    parsed = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    nested = {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    rewrite(tmp_path, lambda tensors: None)
    (tmp_path / "config.json").write_text(json.dumps(nested | {"text_config": parsed}), encoding="utf-8")
    built = build(tmp_path, with_mtp=True)
    assert type(built.model).__name__ == type(build(TINY).model).__name__
    assert len(built.sources) == (NUM_LAYERS + 1) * NUM_EXPERTS


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "qwen3_next"])
def test_name_mapping_of_a_family_fills_every_expert(family: str, tmp_path: Path) -> None:
    """What is used of transformers' internal mapping works for every family that the README names."""
    built = build(write_family(family, tmp_path))
    assert built.layers
    assert len(built.sources) == sum(layer.num_experts for layer in built.layers)
    assert built.num_ignored == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", 0),
        ("head_dim", 0),
        ("hidden_size", -1),
        ("hidden_act", "x"),
        ("num_attention_heads", 0),
        ("pad_token_id", 2**40),
        ("vocab_size", 0),
        ("dtype", "x"),
        ("num_experts_per_tok", NUM_EXPERTS + 1),
    ],
)
def test_config_with_a_wrong_value_is_refused_whatever_transformers_makes_of_it(
    key: str, value: object, tmp_path: Path
) -> None:
    """A wrong value of config.json is an UnsupportedModelError that names the file, not an error of any class."""
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    parsed = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**parsed, key: value}), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        build(tmp_path)
