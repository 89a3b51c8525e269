"""The engine: what an application opens, generates with, asks for logits and statistics, and closes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import anyio

from ..steps.clock import Step, StepClock
from ..steps.statistics import Statistics
from .errors import EngineClosedError, PromptError, RequestTooLongError, WrongLoopError
from .loop import Scheduler
from .opening import Opened, open_parts
from .prompts import Prompt, checked_prompt
from .requests import Request, SingleForward, Token
from .settings import Resolved, resolve

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "open"]

T = TypeVar("T")


class _Opening:
    """What `open` returns: `async with` it, or await it and call `aclose` yourself."""

    def __init__(self, path: str | os.PathLike[str], resolved: Resolved, options: dict[str, Any]) -> None:
        self._path, self._resolved, self._options = path, resolved, options
        self._engine: Engine | None = None

    def __await__(self) -> Generator[Any, None, Engine]:
        return self._open().__await__()

    async def __aenter__(self) -> Engine:
        if self._engine is not None:
            raise RuntimeError(
                "This opening has been entered already: call expertstream.open again for another engine."
            )
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._engine is not None:
            with anyio.CancelScope(shield=True):  # a cancelled host still gets everything back
                await self._engine.aclose()

    async def _open(self) -> Engine:
        return Engine(await open_parts(self._path, self._resolved, **self._options))


def open(
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
    routing: Callable[[int, list[list[int]]], None] | None = None,
    log_stream: TextIO | None = None,
    config_file: str | os.PathLike[str] | None = None,
    **settings: object,
) -> _Opening:
    """Open a checkpoint: `async with expertstream.open(path, slots="50%") as engine`.

    Args:
        path: A folder as the Hugging Face hub lays it out: config.json, safetensors, tokenizer files.
        progress: Called with (bytes read, bytes to read) while expert records are read in the background, from reader
            threads. If it raises it is called no more, and a warning on the log says so.
        routing: Called on the step thread with (MoE layer number, experts per row) at every look-up: a recorder for
            offline replay.
        log_stream: Log entries go there instead of to the structlog of the host application.
        config_file: TOML file of settings.
        **settings: Any setting of docs/configuration.md by name; explicit ones win over environment and file.

    Returns:
        An asynchronous context manager, also awaitable, that gives an `Engine`.

    Raises:
        SettingError: When a setting is unknown or unparsable (at once). What opening itself raises is raised when the
            returned object is entered or awaited: CheckpointError, InsufficientSlotsError, InsufficientHostMemoryError,
            NotDeterministicError, MemoryError, RuntimeError under an event loop that is not asyncio's or when the
            device cannot be used.
    """
    file = None if config_file is None else Path(config_file)
    resolved = resolve(settings, config_file=file)
    return _Opening(path, resolved, {"progress": progress, "routing": routing, "log_stream": log_stream})


class Engine:
    """A model whose experts are streamed. Made by `open`; belongs to the event loop and the process that opened it."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._closing: asyncio.Task[None] | None = None
        self._scheduler: Scheduler = opened.make_scheduler()
        self._task = self._loop.create_task(self._scheduler.run(), name="expertstream-scheduler")
        # A scheduler that fails tells every request; asyncio need not complain about it on top.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def generate(self, prompt: Prompt, *, max_tokens: int = 64) -> AsyncIterator[Token]:
        """Generate greedily, token by token: `async for token in engine.generate("…")`.

        Args:
            prompt: Text, token ids, or chat messages (`[{"role": "user", "content": "…"}]`) for the tokenizer's own
                template.
            max_tokens: Tokens to generate at most, at least 1.

        Returns:
            An asynchronous iterator of `Token`. The request is queued when it is first asked for a token; closing
            it, dropping it or being cancelled ends the request after the step in progress, a draft too, and releases
            everything it held.

        Raises:
            TypeError, ValueError: When an argument is of the wrong kind (at once). While iterating: ValueError for a
                prompt without tokens, a token id outside the vocabulary or a missing chat template,
                RequestTooLongError, NoTokenizerError, EngineClosedError, EngineDeadError, KVFullError, NestedStepError
                when a step is open in the caller's flow, WrongLoopError, and the error of a step that failed.
        """
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int):
            raise TypeError(f"max_tokens must be an int, not {type(max_tokens).__name__}")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
        return self._stream(checked_prompt(prompt), max_tokens)

    async def logits(self, prompt: Prompt) -> torch.Tensor:
        """Compute a whole sequence at once without a KV cache (one `dense` step): the parity reference.

        Args:
            prompt: As for `generate`.

        Returns:
            [tokens, vocabulary], on the engine's device.

        Raises:
            As `generate`.
        """
        self._check_home()
        self.clock.check("dense")
        token_ids = await self._encode(checked_prompt(prompt))
        forwards = self._opened.loaded.forwards
        return await self._single("dense", lambda step: forwards.dense(token_ids))

    async def replay_layer(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute one decoder layer on given hidden states (one `replay` step): per-layer parity.

        Args:
            layer: Decoder layer number, from 0.
            hidden_states: [tokens, hidden], any floating dtype; positions count from 0.

        Returns:
            [tokens, hidden], in the dtype that runs, on the engine's device.

        Raises:
            IndexError: When there is no such layer.
            TypeError: When an argument is of the wrong kind.
            ValueError: When the tensor has another shape.
            As `generate` otherwise.
        """
        self._check_home()
        self.clock.check("replay")
        forwards, config = self._opened.loaded.forwards, self._opened.loaded.built.model.config.get_text_config()
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"layer must be an int, not {type(layer).__name__}")
        if not (hasattr(hidden_states, "is_floating_point") and hidden_states.is_floating_point()):
            kind = getattr(hidden_states, "dtype", type(hidden_states).__name__)
            raise TypeError(f"hidden_states must be a tensor of a floating dtype, not {kind}")
        if not 0 <= layer < forwards.num_layers:
            raise IndexError(f"layer must be 0 to {forwards.num_layers - 1}, not {layer}")
        if hidden_states.ndim != 2 or hidden_states.shape[1] != config.hidden_size or not hidden_states.shape[0]:
            raise ValueError(f"hidden_states must be [tokens, {config.hidden_size}], not {list(hidden_states.shape)}")
        return await self._single("replay", lambda step: forwards.replay(layer, hidden_states))

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids that `generate` would compute for a prompt.

        Args:
            prompt: As for `generate`.

        Raises:
            NoTokenizerError: When text is given and the checkpoint has no tokenizer files.
            NestedStepError: When a step is open in the caller's flow: tokenizing waits for the thread that computes it.
            ValueError: When the prompt has no tokens, or one that is not in the vocabulary.
        """
        self._check_home()
        self.clock.check("paged")
        return await self._encode(checked_prompt(prompt))

    def statistics(self) -> Statistics:
        """Return the totals of all steps ended so far; consistent at step boundaries. Also after closing."""
        return self._opened.counters.snapshot()

    def configure(self, **settings: object) -> None:
        """Change settings that do not latch: `stats_every` and `stats_min_s`, for the steps that follow.

        Args:
            **settings: By name. A setting that latched at open may be given with the value that it has.

        Raises:
            SettingError: When a name is unknown, a value unparsable, or a latched setting would change.
        """
        self._check_home()
        self._opened.reconfigure(settings)

    @property
    def clock(self) -> StepClock:
        """The engine's step clock."""
        return self._opened.clock

    @property
    def facts(self) -> Mapping[str, object]:
        """What `store.built` said of this engine: model, dtype, layers, record bytes, slots, memory, settings."""
        return self._opened.facts

    async def aclose(self) -> None:
        """Close: take no more work, end the step at its next expert look-up, end every request, release all.

        Any number of times, from any task of the engine's loop, also concurrently; cancelling one call does not stop
        the closing. Every part is closed even if another fails; the first error is raised after all.
        """
        self._check_home(even_closed=True)
        if self._closing is None:
            self._closing = self._loop.create_task(self._close(), name="expertstream-close")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._scheduler.close()
        self._opened.loaded.forwards.stop()
        try:
            await asyncio.wait([self._task])
        finally:
            await self._opened.aclose()

    async def _stream(self, prompt: Prompt, max_tokens: int) -> AsyncIterator[Token]:
        self._check_home()
        self.clock.check("paged")  # queued behind the step that asks for it, it would wait for itself
        token_ids = await self._encode(prompt)
        limit = self._opened.loaded.max_model_len
        if len(token_ids) >= limit:
            raise RequestTooLongError(len(token_ids), limit)
        request = Request(token_ids, max_tokens)
        self._scheduler.submit(request)
        try:
            while (token := await request.channel.get()) is not None:
                yield token
        finally:
            request.is_cancelled = True

    async def _single(self, kind: Any, function: Callable[[Step], T]) -> T:
        self._check_home()
        work = SingleForward(kind, function, self._loop.create_future())
        self._scheduler.submit(work)
        result: T = await work.result
        return result

    async def _encode(self, prompt: Prompt) -> list[int]:
        """Tokenize on the step thread: the loop never does."""
        text, vocabulary = self._opened.loaded.text, self._opened.loaded.vocabulary
        if isinstance(prompt, str):
            token_ids: list[int] = await self._opened.thread.submit(lambda: text.encode(prompt))
        elif isinstance(prompt[0], Mapping):
            messages = [dict(m) for m in prompt if isinstance(m, Mapping)]
            token_ids = await self._opened.thread.submit(lambda: text.encode_chat(messages))
        else:
            token_ids = [int(i) for i in prompt if isinstance(i, int)]
        if not token_ids:
            raise PromptError("prompt has no tokens")
        wrong = [i for i in token_ids if not 0 <= i < vocabulary]
        if wrong:
            raise PromptError(f"prompt has token id {wrong[0]}; the vocabulary has {vocabulary} tokens")
        return token_ids

    def _check_home(self, *, even_closed: bool = False) -> None:
        if os.getpid() != self._pid:
            raise WrongLoopError("The engine was opened in another process: open one in this process, after the fork.")
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoopError(
                "The engine was opened under another event loop: open one per loop, and close it there."
            )
        if self._closing is not None and not even_closed:
            raise EngineClosedError()

    def __repr__(self) -> str:
        state = (
            "closed" if self._closing is not None and self._closing.done() else "closing" if self._closing else "open"
        )
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        store = self._opened.loaded.store
        return f"<Engine {state}: {running} running, {waiting} waiting, {self.clock.steps} steps, {store!r}>"
