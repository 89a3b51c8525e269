"""Text to token ids and back, by the checkpoint's own tokenizer files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...memory.checkpoint import Checkpoint
from ...memory.errors import CheckpointError

__all__ = ["NoTokenizerError", "TextCodec", "TextStream"]


class NoTokenizerError(CheckpointError):
    """Raised when text is given or wanted and the checkpoint has no tokenizer files."""


class TextCodec:
    """The tokenizer of a checkpoint, loaded when first used. Not for the event loop: it computes.

    Args:
        checkpoint: Opened.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._tokenizer: Any = None

    @property
    def is_available(self) -> bool:
        """Whether the checkpoint has tokenizer files."""
        return self._checkpoint.tokenizer_files

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a text, special tokens as the tokenizer adds them.

        Raises:
            NoTokenizerError: When the checkpoint has no tokenizer.
            ValueError: When the text has half of a surrogate pair, which no UTF-8 text has.
        """
        return list(self._load()(_encodable(prompt))["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the token ids of chat messages through the tokenizer's own template, with the reply opened.

        Raises:
            NoTokenizerError: When the checkpoint has no tokenizer.
            ValueError: When the tokenizer has no chat template.
        """
        tokenizer = self._load()
        if not tokenizer.chat_template:
            raise ValueError("the checkpoint's tokenizer has no chat template; give the prompt as text or token ids")
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(tokenizer(_encodable(text), add_special_tokens=False)["input_ids"])

    def stream(self) -> TextStream:
        """Return a decoder for one generation; without tokenizer files its text is empty."""
        return TextStream(self._load() if self.is_available else None)

    def _load(self) -> Any:
        if not self.is_available:
            raise NoTokenizerError(self._checkpoint.path, "it has no tokenizer files; give token ids instead of text")
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            path = self._checkpoint.path
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
            except (ImportError, MemoryError):
                raise
            except Exception as exc:  # a damaged file ends as an error of any class
                problem = f"transformers does not take its tokenizer files: {type(exc).__name__}: {exc}"
                raise CheckpointError(path, problem) from exc
        return self._tokenizer


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"prompt has half of a surrogate pair at character {exc.start}, which no text has") from exc
    return text


class TextStream:
    """Turns token ids into text as they come; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token_id: int, *, is_last: bool = False) -> str:
        """Add a token; return the text that is complete with it."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token_id)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not is_last:
            return ""
        new, self._shown = text[self._shown :], len(text)
        if new.endswith("\n") or len(self._ids) > 64:
            # Start over at a place where nothing before can change what comes after, so that a token costs O(1).
            self._ids, self._shown = self._restart(text)
        return new

    def _restart(self, text: str) -> tuple[list[int], int]:
        last = self._ids[-1:]
        return last, len(self._tokenizer.decode(last, skip_special_tokens=True, clean_up_tokenization_spaces=False))
