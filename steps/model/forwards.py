"""The four forwards of a model whose experts are streamed: paged, draft, dense, replay. One thread, one at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...memory.kv_pages import PagePool
from ...memory.store import ExpertStore
from .attention import PagedAttention, choose_kernel
from .build import BuiltModel
from .cache import PagedCache, cache_kinds
from .errors import UnsupportedModelError
from .experts import RoutingHook, StreamedExperts
from .gated_delta import take_weights
from .mixers import RowwiseMixer, find_mixers
from .plugs import plug_in
from .rows import ActiveForward, DecodeRows, PrefillRows, Row, Sequence

__all__ = ["Forwards", "PagedResult"]


@dataclass(frozen=True, slots=True)
class PagedResult:
    """What a paged forward returns.

    Attributes:
        logits: [rows, vocabulary]: of the last position of a prefill chunk, or of every decode row.
        hidden: [rows, hidden]: the body's last hidden state after the final norm, of every position computed.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


class Forwards:
    """A built model with its experts plugged in.

    Args:
        built: The model.
        store: Serves its experts.
        pool: KV pages of the body.
        draft_pool: KV pages of the MTP head; None without one.
        on_routing: See `StreamedExperts`.

    Raises:
        UnsupportedModelError: When a layer caches in a way that is not supported.
    """

    def __init__(
        self,
        built: BuiltModel,
        store: ExpertStore,
        pool: PagePool,
        draft_pool: PagePool | None,
        on_routing: RoutingHook | None = None,
    ) -> None:
        self._built = built
        self._model: Any = built.model
        self._body: Any = built.model.get_decoder()  # type: ignore[no-untyped-call]
        self._kernel = choose_kernel(built.model)
        self._hidden: torch.Tensor | None = None
        self._body.register_forward_hook(self._keep_hidden)
        self._active = ActiveForward(pool)
        self._cache = self._plug(self._model, self._body.config, self._active)
        self._body_keywords = set(inspect.signature(type(self._model).forward).parameters)
        self._draft_active = ActiveForward(draft_pool or pool)
        if built.mtp is not None:
            self._draft_cache = self._plug(built.mtp, built.mtp.config, self._draft_active)
        for layer in built.layers:
            active = self._draft_active if layer.name.startswith("mtp.") else self._active
            plug_in(layer.module, StreamedExperts(layer, store, active, on_routing))

    def new_sequence(self) -> Sequence:
        """Return an empty sequence."""
        return Sequence()

    @torch.inference_mode()
    def prefill(self, sequence: Sequence, token_ids: Seq[int]) -> PagedResult:
        """Compute the next positions of a sequence as one chunk (`paged`).

        Args:
            sequence: Its pages must reach to the last new position.
            token_ids: At least one.
        """
        start, count = sequence.num_tokens, len(token_ids)
        device = self._device
        with self._computing(self._active, PrefillRows(sequence, start, count)):
            out = self._model(
                input_ids=torch.tensor([token_ids], device=device),
                position_ids=torch.arange(start, start + count, device=device).unsqueeze(0),
                use_cache=True,
                logits_to_keep=1,
                **self._cache_keyword(self._cache),
            )
        sequence.num_tokens += count
        return PagedResult(out.logits[0], self._take_hidden()[0])

    @torch.inference_mode()
    def decode(self, rows: Seq[tuple[Sequence, Seq[int]]]) -> tuple[PagedResult, DecodeRows]:
        """Compute rows by the one-token rule (`paged`): for each sequence its next token and any drafts after it.

        Nothing is kept until `DecodeRows.keep` says how many rows of each sequence were accepted.

        Args:
            rows: Sequence → the token ids of its next positions, at least one each.
        """
        planned = [Row(s, s.num_tokens + offset) for s, token_ids in rows for offset in range(len(token_ids))]
        tokens = [token for _, token_ids in rows for token in token_ids]
        batch = DecodeRows(tuple(planned), tuple({} for _ in planned))
        ids = torch.tensor(tokens, device=self._device).unsqueeze(1)
        position_ids = torch.tensor([row.position for row in planned], device=self._device).unsqueeze(1)
        with self._computing(self._active, batch):
            out = self._model(
                input_ids=ids, position_ids=position_ids, use_cache=True, **self._cache_keyword(self._cache)
            )
        return PagedResult(out.logits[:, 0], self._take_hidden()[:, 0]), batch

    @torch.inference_mode()
    def draft(self, sequence: Sequence, next_ids: Seq[int], hidden: torch.Tensor) -> PagedResult:
        """Compute consecutive positions of the MTP head over its own KV (`draft`).

        Args:
            sequence: The head's own sequence.
            next_ids: The token *after* each position.
            hidden: [positions, hidden], the body's last hidden state at each position, or the head's own.

        Returns:
            Logits [1, vocabulary] that predict the token after `next_ids[-1]`, and the head's hidden states
            [positions, hidden].
        """
        head = self._built.mtp
        if head is None:
            raise RuntimeError("The engine was opened without speculation: no MTP head is loaded.")
        start, count = sequence.num_tokens, len(next_ids)
        positions = torch.arange(start, start + count, device=self._device).unsqueeze(0)
        embeddings = self._model.get_input_embeddings()(torch.tensor([next_ids], device=self._device))
        with self._computing(self._draft_active, PrefillRows(sequence, start, count)):
            tables = self._rotary(embeddings, positions)
            out = head(embeddings, hidden.unsqueeze(0), tables, positions, self._layer_cache_keyword(self._draft_cache))
        sequence.num_tokens += count
        return PagedResult(self._model.lm_head(out[0, -1:]), out[0])

    @torch.inference_mode()
    def dense(self, token_ids: Seq[int]) -> torch.Tensor:
        """Compute a whole sequence at once without a KV cache (`dense`): logits [tokens, vocabulary]."""
        with self._computing(self._active, None):
            out = self._model(input_ids=torch.tensor([token_ids], device=self._device), use_cache=False)
        self._take_hidden()
        return torch.as_tensor(out.logits[0])

    @torch.inference_mode()
    def replay(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Compute one decoder layer on given hidden states (`replay`), as if they were a sequence from position 0.

        Args:
            layer: Decoder layer number.
            hidden: [tokens, hidden].

        Returns:
            [tokens, hidden].
        """
        x = hidden.to(self._device, self._built.dtype).unsqueeze(0)
        positions = torch.arange(x.shape[1], device=self._device).unsqueeze(0)
        with self._computing(self._active, None):
            tables = self._rotary(x, positions)
            out = self._body.layers[layer](x, position_embeddings=tables, attention_mask=None, position_ids=positions)
        return torch.as_tensor(out[0] if isinstance(out, tuple) else out)[0]

    @staticmethod
    def join(hidden: Seq[torch.Tensor]) -> torch.Tensor:
        """Return hidden states [rows, hidden] of consecutive rows, one under the other."""
        return torch.cat(list(hidden))

    def stop(self) -> None:
        """End the forward in progress at its next expert look-up, and every later one. From any thread."""
        self._active.is_stopped = self._draft_active.is_stopped = True

    @property
    def num_layers(self) -> int:
        """Decoder layers of the body."""
        return len(self._body.layers)

    @property
    def _device(self) -> torch.device:
        return torch.device(self._model.get_input_embeddings().weight.device)

    def _rotary(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the body's rotary tables. Multimodal ones want a row each for time, height and width: text has one."""
        rotary = self._body.rotary_emb
        if getattr(rotary, "mrope_section", None) is not None:
            positions = positions.expand(3, *positions.shape)
        tables: tuple[torch.Tensor, torch.Tensor] = rotary(x, positions)
        return tables

    def _plug(self, root: torch.nn.Module, config: Any, active: ActiveForward) -> PagedCache:
        try:
            cache = PagedCache(cache_kinds(config), active)
        except NotImplementedError as exc:
            raise UnsupportedModelError(getattr(config, "name_or_path", "") or ".", str(exc)) from exc
        states = cache.state_layers()
        mixers = find_mixers(root, list(states))
        if set(mixers) != set(states):
            raise UnsupportedModelError(
                ".", f"no recurrent module found for layers {sorted(set(states) - set(mixers))}"
            )
        for number, module in mixers.items():
            weights = take_weights(module, number, cache)
            module.forward = RowwiseMixer(number, module, states[number], active, weights)
        for module in root.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "scaling"):
                plug_in(module, PagedAttention(module, self._kernel, active))
        return cache

    @contextmanager
    def _computing(self, active: ActiveForward, rows: PrefillRows | DecodeRows | None) -> Iterator[None]:
        active.rows = rows
        try:
            with _plain_sdpa() if self._device.type == "cuda" else nullcontext():
                yield
        finally:
            active.rows = None

    def _keep_hidden(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    def _take_hidden(self) -> torch.Tensor:
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise RuntimeError("The model ran without its body: no hidden state was seen.")
        return hidden

    def _cache_keyword(self, cache: PagedCache) -> dict[str, object]:
        # 5.17 names it `past_key_values`, 5.24 `cache`; each swallows the other's name in silence: ask the signature.
        return {"cache" if "cache" in self._body_keywords else "past_key_values": cache}

    def _layer_cache_keyword(self, cache: PagedCache) -> dict[str, object]:
        names = inspect.signature(type(self._body.layers[-1]).forward).parameters
        return {"cache" if "cache" in names else "past_key_values": cache}


def _plain_sdpa() -> AbstractContextManager[None]:
    """Keep SDPA off cuDNN, which plans anew for every length of the keys: 4.2 ms of a decode row's layer on an H200.

    The choice is one of the process: another thread's SDPA chooses among the same backends while a forward runs.
    """
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    context: AbstractContextManager[None] = sdpa_kernel(backends)
    return context
