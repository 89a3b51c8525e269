"""What a prompt may be: text, token ids, or chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Prompt", "checked_prompt"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text, token ids, or chat messages with `role` and `content`."""


def checked_prompt(prompt: object) -> Any:
    """Return a prompt as it is.

    Raises:
        TypeError: When it is none of the three.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)) and prompt:
        if all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            return prompt
        if all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt):
            return prompt
    raise TypeError("prompt must be text, a non-empty sequence of token ids, or chat messages with role and content")
