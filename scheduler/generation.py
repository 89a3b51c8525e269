"""One request from prompt to last token: prefill on a fixed grid, then decode rows, with drafts if they are on.

Greedy. Each method that ends in `_step` is the body of one step and runs on the step thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypeVar

from ..steps.clock import Step, StepKind
from .requests import FinishReason, Request, Token
from .step_runner import StepRunner

if TYPE_CHECKING:  # they import torch, which the loop does not wait for
    import torch

    from ..steps.model.forwards import Forwards, PagedResult
    from ..steps.model.text import TextStream
    from .loading import Loaded

__all__ = ["Generation"]

T = TypeVar("T")


class Generation:
    """The state of one request while it runs.

    Args:
        request: What was asked.
        loaded: The engine's model and pools.
        steps: Runs forwards.
        prefill_chunk: Tokens; prompts are cut at multiples of it.
        num_drafts: Drafts per iteration at most.

    Raises:
        KVFullError: When the pool has too few free pages.
    """

    def __init__(
        self, request: Request, loaded: Loaded, steps: StepRunner, *, prefill_chunk: int, num_drafts: int
    ) -> None:
        self._request, self._loaded, self._steps = request, loaded, steps
        self._forwards: Forwards = loaded.forwards
        self._prefill_chunk, self._num_drafts = prefill_chunk, num_drafts
        self._limit = min(request.max_tokens, loaded.max_model_len - len(request.prompt_ids))
        self._text: TextStream | None = None  # made on the step thread: the loop loads no tokenizer
        self._num_tokens = 0
        self._sequence = self._forwards.new_sequence()
        self._draft_sequence = self._forwards.new_sequence()
        total = len(request.prompt_ids) + self._limit + num_drafts
        loaded.pool.reserve(self._sequence.table, total)
        if num_drafts and loaded.draft_pool is not None:
            loaded.draft_pool.reserve(self._draft_sequence.table, total)

    async def run(self) -> None:
        """Generate until an end token, the limit, or the request's cancellation."""
        tokens, hidden, start = await self._prefill()
        while self._emit(tokens):
            prompt_rest = self._request.prompt_ids[start + 1 :] if start is not None else []
            accepted = [token.id for token in tokens]
            drafts = await self._draft([*prompt_rest, *accepted], hidden)
            if self._request.is_cancelled:
                return
            token_ids, start = [accepted[-1], *drafts], None
            tokens, hidden = await self._run("paged", self._verify_step, token_ids)

    def release(self) -> None:
        """Return every page. Idempotent."""
        self._loaded.pool.release(self._sequence.table)
        if self._loaded.draft_pool is not None:
            self._loaded.draft_pool.release(self._draft_sequence.table)

    async def _prefill(self) -> tuple[list[Token], torch.Tensor, int | None]:
        """Compute the prompt; return the first token, the last chunk's hidden states and where that chunk starts."""
        prompt, size = self._request.prompt_ids, self._prefill_chunk
        for start in range(0, len(prompt), size):
            chunk = prompt[start : start + size]
            is_last = start + size >= len(prompt)
            tokens, hidden = await self._run("paged", self._prefill_step, chunk, is_last)
            if is_last or self._request.is_cancelled:
                break
            if self._num_drafts:
                # The head takes the token after each position: the chunk's last one needs the next chunk's first.
                next_ids = prompt[start + 1 : start + size + 1]
                await self._run("draft", self._draft_step, next_ids, hidden, 0)
                if self._request.is_cancelled:
                    break
        return tokens, hidden, start

    async def _draft(self, next_ids: Seq[int], hidden: torch.Tensor) -> list[int]:
        """Draft up to k tokens: one forward for the positions the body computed since, then one per further draft."""
        num_drafts = min(self._num_drafts, self._limit - self._num_tokens - 1)
        if num_drafts < 1:
            return []
        kept = self._draft_sequence.num_tokens + len(next_ids)
        ids, states = list(next_ids), hidden
        drafts: list[int] = []
        for _ in range(num_drafts):
            if self._request.is_cancelled:
                break
            draft, states = await self._run("draft", self._draft_step, ids, states, 1)
            drafts.append(draft)
            ids = [draft]
        # Further drafts stood on the head's own hidden state: their positions are computed again from the body's.
        self._draft_sequence.num_tokens = kept
        return drafts

    def _prefill_step(self, step: Step, chunk: list[int], is_last: bool) -> tuple[list[Token], torch.Tensor]:
        result = self._forwards.prefill(self._sequence, chunk)
        step.count_tokens(prefill=len(chunk))
        return self._make_tokens(_greedy(result)) if is_last else [], result.hidden

    def _verify_step(self, step: Step, token_ids: list[int]) -> tuple[list[Token], torch.Tensor]:
        """Compute the next token and the drafts after it; keep the rows whose input was right."""
        if self._loaded.is_row_exact:
            return self._verify_row_by_row(step, token_ids)
        result, rows = self._forwards.decode([(self._sequence, token_ids)])
        chosen = _greedy(result)
        num_right = 0
        while num_right < len(token_ids) - 1 and chosen[num_right] == token_ids[num_right + 1]:
            num_right += 1
        rows.keep(self._sequence, num_right + 1)
        step.count_tokens(decode=len(token_ids), accepted=num_right)
        return self._make_tokens(chosen[: num_right + 1]), result.hidden[: num_right + 1]

    def _verify_row_by_row(self, step: Step, token_ids: list[int]) -> tuple[list[Token], torch.Tensor]:
        """Do the same with each row by itself, as plain decoding computes it; the first wrong draft ends it."""
        chosen: list[int] = []
        hidden = []
        for token_id, draft in zip(token_ids, [*token_ids[1:], None]):
            result, rows = self._forwards.decode([(self._sequence, [token_id])])
            rows.keep(self._sequence, 1)
            chosen += _greedy(result)
            hidden.append(result.hidden)
            if chosen[-1] != draft:
                break
        step.count_tokens(decode=len(chosen), accepted=len(chosen) - 1)
        return self._make_tokens(chosen), hidden[0] if len(hidden) == 1 else self._forwards.join(hidden)

    def _draft_step(self, step: Step, ids: Seq[int], hidden: torch.Tensor, count: int) -> tuple[int, torch.Tensor]:
        result = self._forwards.draft(self._draft_sequence, ids, hidden)
        step.count_tokens(drafted=count)
        return _greedy(result)[-1], result.hidden[-1:]

    def _make_tokens(self, token_ids: Seq[int]) -> list[Token]:
        """Decode the text of new tokens, up to the one that ends the generation."""
        if self._text is None:
            self._text = self._loaded.text.stream()
        tokens: list[Token] = []
        for token_id in token_ids:
            reason: FinishReason | None = None
            if token_id in self._loaded.end_ids:
                reason = "stop"
            elif self._num_tokens + 1 >= self._limit:
                reason = "length"
            text = "" if reason == "stop" else self._text.push(token_id, is_last=reason is not None)
            tokens.append(Token(token_id, text, self._num_tokens, reason))
            self._num_tokens += 1
            if reason is not None:
                break
        return tokens

    def _emit(self, tokens: Seq[Token]) -> bool:
        """Hand tokens to the caller; return whether there is more to generate."""
        for token in tokens:
            self._request.channel.put(token)
        return bool(tokens) and tokens[-1].finish_reason is None and not self._request.is_cancelled

    async def _run(self, kind: StepKind, body: Callable[..., T], *arguments: object) -> T:
        return await self._steps.run(kind, self._request.context, lambda step: body(step, *arguments))


def _greedy(result: PagedResult) -> list[int]:
    chosen: list[int] = result.logits.argmax(dim=-1).tolist()
    return chosen
