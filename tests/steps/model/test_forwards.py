"""The four forwards against plain transformers, and the MTP head against its oracle and its model card."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import NUM_LAYERS, PROMPT, TINY, reference, tokenizer

from expertstream.scheduler.loading import Loaded, load
from expertstream.scheduler.settings import resolve

TEXT = (Path(__file__).parents[2] / "support" / "tiny.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    settings = resolve({"slots": "50%", "speculate": 1}, environ={}).settings
    opened = load(
        TINY,
        settings,
        check_cancelled=lambda: None,
        on_progress=None,
        on_not_pinned=lambda reason: None,
        on_routing=None,
    )
    yield opened
    opened.close()


def token_ids(text: str, limit: int = 10_000) -> list[int]:
    ids: list[int] = tokenizer()(text)["input_ids"]
    return ids[:limit]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_dense_and_paged_forwards_agree_with_plain_transformers(loaded: Loaded) -> None:
    """A whole sequence at once, in chunks, and row by row: all within 1e-5 of the plain model in float32."""
    ids = token_ids(TEXT, 150)
    with torch.inference_mode():
        plain = reference()(torch.tensor([ids])).logits[0]
    assert relative(loaded.forwards.dense(ids), plain) < 1e-5
    sequence = loaded.forwards.new_sequence()
    loaded.pool.reserve(sequence.table, len(ids))
    for start in range(0, 120, 50):  # chunks of 50, 50 and 20: later ones attend to pages and continue states
        chunk = loaded.forwards.prefill(sequence, ids[start : min(start + 50, 120)])
    assert relative(chunk.logits[0], plain[119]) < 1e-5
    for position in range(120, 150):
        row, rows = loaded.forwards.decode([(sequence, [ids[position]])])
        rows.keep(sequence, 1)
        assert relative(row.logits[0], plain[position]) < 1e-5
    assert sequence.num_tokens == 150
    loaded.pool.release(sequence.table)


def test_rows_in_company_agree_with_rows_alone_and_keep_as_many_as_they_are_told(loaded: Loaded) -> None:
    """Rows of one sequence in one forward see each other's keys and states; what is kept is what single rows leave."""
    ids = token_ids(TEXT, 60)
    alone, company = loaded.forwards.new_sequence(), loaded.forwards.new_sequence()
    for sequence in (alone, company):
        loaded.pool.reserve(sequence.table, 60)
        loaded.forwards.prefill(sequence, ids[:40])
    single = []
    for token_id in ids[40:46]:
        result, rows = loaded.forwards.decode([(alone, [token_id])])
        rows.keep(alone, 1)
        single.append(result.logits[0])
    together, rows = loaded.forwards.decode([(company, ids[40:46])])
    assert relative(together.logits, torch.stack(single)) < 1e-5
    rows.keep(company, 3)
    assert company.num_tokens == 43
    after, _ = loaded.forwards.decode([(company, [ids[43]])])
    assert relative(after.logits[0], single[3]) < 1e-5
    for sequence in (alone, company):
        loaded.pool.release(sequence.table)


def test_rows_of_two_sequences_in_one_forward_agree_with_rows_alone(loaded: Loaded) -> None:
    """Each row reads its own sequence's pages and states."""
    ids = token_ids(TEXT, 40)
    alone = []
    for start in (0, 10):
        sequence = loaded.forwards.new_sequence()
        loaded.pool.reserve(sequence.table, 32)
        loaded.forwards.prefill(sequence, ids[start : start + 20])
        alone.append((sequence, loaded.forwards.decode([(sequence, [7])])[0].logits[0]))
    together, _ = loaded.forwards.decode([(sequence, [7]) for sequence, _ in alone])
    assert relative(together.logits, torch.stack([logits for _, logits in alone])) < 1e-5
    for sequence, _ in alone:
        loaded.pool.release(sequence.table)


def test_replayed_layers_agree_with_the_plain_model(loaded: Loaded) -> None:
    """Each decoder layer on the plain model's own hidden states gives the plain layer's output."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, output: seen.append((args[0][0], output[0])))
        for layer in reference().model.layers
    ]
    with torch.inference_mode():
        reference()(torch.tensor([token_ids(PROMPT)]))
    for hook in hooks:
        hook.remove()
    assert len(seen) == NUM_LAYERS
    for number, (before, after) in enumerate(seen):
        assert relative(loaded.forwards.replay(number, before), after) < 1e-5


def test_mtp_head_agrees_with_the_head_of_transformers(loaded: Loaded) -> None:
    """The assembled head gives the logits of transformers' own MtpModel where that reads these tensors (5.24)."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this transformers version has no MtpModel that maps these names")
    ids = token_ids(PROMPT)
    plain = copy.copy(reference())
    plain.config = copy.deepcopy(plain.config)
    plain.config.num_mtp_layers, plain.config.mtp_layer_types = 1, ["full_attention"]
    oracle = _oracle(layers.MtpModel, plain)
    with torch.inference_mode():
        hidden = reference().model(torch.tensor([ids])).last_hidden_state
        positions = torch.arange(1, len(ids)).unsqueeze(0)
        states = oracle.forward_layer(0, hidden[:, :-1], positions, None, input_ids=torch.tensor([ids[1:]]))
        wanted = oracle._project_to_logits(states)[0, -1]
    sequence = loaded.forwards.new_sequence()
    assert loaded.draft_pool is not None
    loaded.draft_pool.reserve(sequence.table, len(ids))
    got = loaded.forwards.draft(sequence, ids[1:], hidden[0, :-1])
    loaded.draft_pool.release(sequence.table)
    assert relative(got.logits[0], wanted) < 1e-5


def _oracle(model_class: Any, plain: Any) -> Any:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(TINY.glob("*.safetensors")):
        tensors |= {n.removeprefix("mtp."): t.float() for n, t in load_file(shard).items() if n.startswith("mtp.")}
    head = model_class(plain, 1).eval().float()
    head.config._experts_implementation = "grouped_mm"
    layer = head.layers[0]
    renames = {"fc.weight": layer.eh_proj, "pre_fc_norm_embedding.weight": layer.enorm, "norm.weight": layer.post_norm}
    for name, module in {**renames, "pre_fc_norm_hidden.weight": layer.hnorm}.items():
        module.weight.data = tensors.pop(name)
    block = {n.removeprefix("layers.0."): t for n, t in tensors.items()}
    experts = "mlp.experts."
    down = [block.pop(f"{experts}{e}.down_proj.weight") for e in range(32)]
    gates = [
        (block.pop(f"{experts}{e}.gate_proj.weight"), block.pop(f"{experts}{e}.up_proj.weight")) for e in range(32)
    ]
    block[experts + "down_proj"] = torch.stack(down)
    block[experts + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in gates])
    layer.mtp_block.load_state_dict(block)
    return head


def test_drafts_agree_with_the_body_about_as_often_as_the_model_card_says(loaded: Loaded) -> None:
    """On ordinary Python text the head's choice is the body's next choice in about 70 % of positions (model card)."""
    ids = token_ids(TEXT, 400)
    dense = loaded.forwards.dense(ids).argmax(-1)
    with torch.inference_mode():
        hidden = reference().model(torch.tensor([ids])).last_hidden_state[0]
    sequence = loaded.forwards.new_sequence()
    assert loaded.draft_pool is not None
    loaded.draft_pool.reserve(sequence.table, len(ids))
    agreed = 0
    for position in range(len(ids) - 1):
        draft = loaded.forwards.draft(sequence, ids[position + 1 : position + 2], hidden[position : position + 1])
        agreed += int(draft.logits[0].argmax()) == int(dense[position + 1])
    loaded.draft_pool.release(sequence.table)
    assert 0.5 < agreed / (len(ids) - 1) < 0.9


def test_the_cache_grows_under_the_name_that_this_transformers_takes(loaded: Loaded) -> None:
    """5.17 and 5.24 swallow a wrongly named cache in silence: pages and states prove that ours was used."""
    sequence = loaded.forwards.new_sequence()
    loaded.pool.reserve(sequence.table, 8)
    loaded.forwards.prefill(sequence, [5, 6, 7])
    keys, values = loaded.pool.read(3, sequence.table, 0, 3)
    assert keys.shape == values.shape == (3, 2, 32)
    assert bool(keys.abs().sum(dim=(1, 2)).gt(0).all())
    assert sorted(sequence.states) == [0, 1, 2, 4, 5, 6]
    loaded.pool.release(sequence.table)
