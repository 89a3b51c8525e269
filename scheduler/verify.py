"""Proves on this machine that streaming changes nothing: streamed against resident, and against plain transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO

import anyio

from .engine import Engine, open
from .settings import resolve

if TYPE_CHECKING:
    import torch

__all__ = ["Check", "VerifyReport", "verify"]

PROMPT = 'def read_file(path, encoding="utf-8"):\n    """Read a file and return its text.\n\n    The quick brown fox '
NUM_PROMPT_TOKENS = 1000
"""At most, as far as the model takes so many: long enough for every layer to want more experts than it has slots."""

SHARE_TO_TEST = 0.25
"""Of a layer's experts, what is resident when `slots` says nothing: a run that evicts nobody proves nothing."""

NUM_NEW_TOKENS = 32

FLOAT32_BOUND = 1e-5
"""Largest difference of logits over the largest logit, float32."""

HALF_BOUND = 5e-2
"""The same for one position in bfloat16 and float16: one rounding of the last layers is 4e-3."""

HALF_AGREEMENT = 0.9
"""Least share of positions within `HALF_BOUND`, and with the same most likely token, in bfloat16 and float16.

Not all: where two experts are nearly as likely, another attention kernel's rounding can make the router choose the
other.
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        name: What was compared.
        passed: Whether it held.
        figures: Numbers, by name.
    """

    name: str
    passed: bool
    figures: Mapping[str, float | int | str]

    def __str__(self) -> str:
        listed = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in self.figures.items()
        )
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name}: {listed}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All comparisons, in order; `passed` when every one of them held."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every comparison held."""
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, object]:
        """Return it as plain values."""
        return {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}


@dataclass(frozen=True, slots=True)
class _Run:
    """What one engine gave."""

    prompt_ids: list[int]
    logits: torch.Tensor
    tokens: list[int]
    slots: int
    evictions: int
    is_row_exact: bool
    can_speculate: bool
    num_layers: int
    slots_to_test: int


async def verify(
    path: str | os.PathLike[str],
    *,
    per_layer: bool,
    settings: Mapping[str, object],
    report: Callable[[str], None],
    log_stream: TextIO | None = None,
) -> VerifyReport:
    """Compare streamed, resident and plain runs of a checkpoint. The whole model must fit the device once more.

    Args:
        path: The checkpoint's folder; tokenizer files are not needed.
        per_layer: Also compare every decoder layer on the plain model's own hidden states.
        settings: As for `open`; `slots` is what is put to the test: without it 25 % of each layer's experts, at least
            top-k. Without `dtype` it is float32 here.
        report: Called with one line per comparison as it is made.
        log_stream: As for `open`.

    Returns:
        The comparisons. Bit equality is asked of streamed against resident in every dtype; of speculation against plain
        decoding where rows do not depend on their companions (on the CPU); against plain
        transformers `FLOAT32_BOUND` in float32, `HALF_BOUND` and `HALF_AGREEMENT` in bfloat16 and float16.

    Raises:
        What `open` raises.
    """
    chosen: dict[str, Any] = {**settings, "dtype": settings.get("dtype") or "float32"}
    checks: list[Check] = []

    def add(check: Check) -> None:
        checks.append(check)
        report(str(check))

    plain = {**chosen, "speculate": 0}
    resident = await _run(path, {**plain, "slots": "100%"}, log_stream)
    if resolve(chosen).settings.slots.kind == "auto":
        chosen["slots"] = plain["slots"] = resident.slots_to_test
    streamed = await _run(path, plain, log_stream)
    tried = {"slots": streamed.slots, "evictions": streamed.evictions}
    note = "" if streamed.evictions else " (nothing was evicted: nothing was put to the test)"
    for check in (
        _equal_logits("streamed against resident, logits", streamed.logits, resident.logits),
        _equal_tokens("streamed against resident, greedy tokens", streamed.tokens, resident.tokens),
    ):
        add(Check(check.name + note, check.passed, {**check.figures, **tried}))
    if streamed.can_speculate:
        drafts = int(str(chosen.get("speculate") or 0)) or 1
        speculated = await _run(path, {**chosen, "speculate": drafts}, log_stream)
        check = _equal_tokens(
            f"{drafts} drafts against plain decoding, greedy tokens", speculated.tokens, streamed.tokens
        )
        add(check if streamed.is_row_exact else Check(check.name + " (no promise here)", True, check.figures))
    await _against_transformers(path, chosen, streamed, per_layer, add, log_stream)
    return VerifyReport(tuple(checks))


async def _run(path: str | os.PathLike[str], settings: Mapping[str, Any], log_stream: TextIO | None) -> _Run:
    async with open(path, log_stream=log_stream, **settings) as engine:
        prompt = await _prompt_ids(engine)
        logits = await engine.logits(prompt)
        tokens = [token.id async for token in engine.generate(prompt, max_tokens=NUM_NEW_TOKENS)]
        facts: Mapping[str, Any] = engine.facts
        share = int(min(facts["experts_per_layer"]) * SHARE_TO_TEST)
        return _Run(
            prompt,
            logits,
            tokens,
            facts["slots"],
            engine.statistics().evictions,
            facts["row_exact"],
            facts["mtp_available"],
            facts["decoder_layers"],
            max(share, *facts["top_k"]),
        )


async def _prompt_ids(engine: Engine) -> list[int]:
    facts: Mapping[str, Any] = engine.facts
    limit = min(NUM_PROMPT_TOKENS, facts["max_model_len"] - NUM_NEW_TOKENS - 1)
    if facts["tokenizer"]:
        one = await engine.tokenize(PROMPT)
        repeated: list[int] = (one * -(-limit // len(one)))[:limit]
        return repeated
    state, ids = 1, []
    for _ in range(limit):
        state = (state * 1103515245 + 12345) % (1 << 31)  # the C standard's example generator: no library may change it
        ids.append(state % facts["vocabulary"])
    return ids


async def _against_transformers(
    path: str | os.PathLike[str],
    settings: Mapping[str, Any],
    run: _Run,
    per_layer: bool,
    add: Callable[[Check], None],
    log_stream: TextIO | None,
) -> None:
    from ..steps.model.reference import run_reference

    reference = await anyio.to_thread.run_sync(run_reference, path, run.prompt_ids, run.logits.dtype, run.logits.device)
    add(_close("streamed against transformers, logits", run.logits, reference.logits, is_final=True))
    if not per_layer:
        return
    async with open(path, log_stream=log_stream, **{**settings, "speculate": 0}) as engine:
        for number in range(run.num_layers):
            out = await engine.replay_layer(number, reference.layer_inputs[number])
            add(_close(f"layer {number} against transformers", out, reference.layer_outputs[number], is_final=False))


def _equal_logits(name: str, a: torch.Tensor, b: torch.Tensor) -> Check:
    differing = int((a != b).sum())
    return Check(name, differing == 0 and a.shape == b.shape, {"elements": a.numel(), "differing": differing})


def _equal_tokens(name: str, a: list[int], b: list[int]) -> Check:
    same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return Check(name, a == b, {"tokens": len(b), "equal": same})


def _close(name: str, a: torch.Tensor, b: torch.Tensor, *, is_final: bool) -> Check:
    import torch

    by_position = (a.double() - b.double()).abs().amax(-1) / b.double().abs().max()
    difference = float(by_position.max())
    figures: dict[str, float | int | str] = {"relative difference": difference}
    if a.dtype == torch.float32:
        return Check(name, difference <= FLOAT32_BOUND, {**figures, "bound": FLOAT32_BOUND})
    within = float((by_position <= HALF_BOUND).double().mean())
    figures["positions within the bound"] = within
    passed = within >= HALF_AGREEMENT
    if is_final:
        agreement = float((a.argmax(-1) == b.argmax(-1)).double().mean())
        figures["argmax agreement"] = agreement
        passed &= agreement >= HALF_AGREEMENT
    return Check(name, passed, {**figures, "bound": HALF_BOUND})
