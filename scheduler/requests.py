"""A request's life: what was asked, its tokens on their way to the caller, and how it ended."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

__all__ = ["FinishReason", "Request", "Token", "TokenChannel"]

FinishReason = Literal["stop", "length"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    Attributes:
        id: Token id.
        text: The text that became complete with it; may be empty (a character still lacks bytes; an end token; no
            tokenizer files).
        index: 0 for the first generated token.
        finish_reason: On the last token "stop" (an end token of the generation config, or of config.json where that
            names none) or "length" (max_tokens, or the longest request reached); None before.
    """

    id: int
    text: str
    index: int
    finish_reason: FinishReason | None = None


class TokenChannel:
    """Tokens from the scheduler to one consumer in the same loop. Holds at most the request's own tokens."""

    def __init__(self) -> None:
        self._tokens: deque[Token] = deque()
        self._changed = asyncio.Event()
        self._is_ended = False
        self._error: BaseException | None = None

    def put(self, token: Token) -> None:
        """Add a token."""
        self._tokens.append(token)
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """End the channel, with an error or without. Only the first end counts."""
        if not self._is_ended:
            self._is_ended, self._error = True, error
            self._changed.set()

    async def get(self) -> Token | None:
        """Return the next token; None at the end. Tokens put before an error are delivered before it is raised."""
        while not self._tokens:
            if self._is_ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._tokens.popleft()


@dataclass(eq=False, slots=True)
class Request:
    """One generation.

    Attributes:
        prompt_ids: At least one.
        max_tokens: Tokens to generate at most.
        channel: Where they go.
        context: The caller's: steps of this request run in it, so a step open in the caller's flow is seen there, and
            what the caller bound for its logs reaches entries from our threads.
        is_cancelled: Set when nobody wants the tokens any more; the step in progress is finished, then it ends.
        is_cut_short: Set when the engine's closing is what ended it.
    """

    prompt_ids: list[int]
    max_tokens: int
    channel: TokenChannel = field(default_factory=TokenChannel)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    is_cancelled: bool = False
    is_cut_short: bool = False


@dataclass(eq=False, slots=True)
class SingleForward:
    """A single forward that a caller asked for by itself (`dense` or `replay`).

    Attributes:
        kind: The step's kind.
        function: Runs on the step thread.
        result: Of the function.
        context: The caller's.
    """

    kind: Literal["dense", "replay"]
    function: Any
    result: asyncio.Future[Any]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    @property
    def is_cut_short(self) -> bool:
        """Never: a forward that has ended has its result."""
        return False

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller has gone."""
        return self.result.cancelled()
