"""What an engine raises that is not the caller's argument and not the checkpoint."""

from __future__ import annotations

__all__ = [
    "DeviceUnavailableError",
    "EngineClosedError",
    "EngineDeadError",
    "PromptError",
    "RequestTooLongError",
    "WrongLoopError",
]


class DeviceUnavailableError(RuntimeError):
    """Raised when a GPU is asked for, and torch or CuPy finds none that it can use."""


class PromptError(ValueError):
    """Raised when a prompt cannot be used: it has no tokens, or a token id that the vocabulary does not have."""


class EngineClosedError(RuntimeError):
    """Raised when a closed or closing engine is asked for work, and by requests that its closing ended."""

    def __init__(self) -> None:
        super().__init__("The engine is closed: open it again for more work.")


class EngineDeadError(RuntimeError):
    """Raised by every request when the scheduler itself has failed; its cause is the first error."""

    def __init__(self) -> None:
        super().__init__(
            "The engine's scheduler has failed and runs no more steps; close the engine. The cause is attached."
        )


class RequestTooLongError(PromptError):
    """Raised when a prompt leaves no room for a token.

    Attributes:
        asked: Tokens of the prompt.
        limit: Tokens of a request, prompt and generated together.
    """

    def __init__(self, asked: int, limit: int) -> None:
        super().__init__(
            f"Cannot take a prompt of {asked} tokens: a request has at most {limit}, generated ones included."
        )
        self.asked, self.limit = asked, limit


class WrongLoopError(RuntimeError):
    """Raised when an engine is used from another event loop, or another process, than the one that opened it."""
