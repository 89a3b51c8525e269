"""`expertstream generate`: one prompt, its continuation on stdout as it comes, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from cyclopts import Parameter, validators

from .failures import ExitCode, UsageError
from .flags import NO_FLAGS, Flags
from .one_shot import run_one_shot
from .progress import loading_bar

if TYPE_CHECKING:
    from ...steps.statistics import Statistics

__all__ = ["Generated", "Generation", "PositiveInt", "generate", "stream_text"]

PositiveInt = Annotated[int, Parameter(validator=validators.Number(gte=1))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one `generate` command asks for; `flags` are arguments of `expertstream.open`."""

    model: Path
    prompt: str
    max_tokens: int
    chat: bool
    flags: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Generated:
    """What a generation came to: tokens, seconds from the request to the last token, and the engine's counters."""

    num_tokens: int
    wall_s: float
    statistics: Statistics


async def stream_text(generation: Generation, out: TextIO, *, shows_prompt: bool = False) -> Generated:
    """Opens the model, writes the continuation to `out` token by token, and closes the model.

    Args:
        generation: What is asked for.
        out: Where the text goes.
        shows_prompt: Write the prompt in front of it, once the model is open.

    Raises:
        BrokenPipeError: Whoever read `out` went away; the model is closed all the same.
    """
    from ..engine import open as open_engine

    asked = [{"role": "user", "content": generation.prompt}] if generation.chat else generation.prompt
    async with AsyncExitStack() as stack:
        bar = stack.enter_context(ExitStack())
        progress = bar.enter_context(loading_bar())
        opened = open_engine(generation.model, log_stream=sys.stderr, progress=progress, **generation.flags)
        engine = await stack.enter_async_context(opened)
        if shows_prompt:
            out.write(generation.prompt)
        begin_s = perf_counter()
        num_tokens = 0
        async for token in engine.generate(asked, max_tokens=generation.max_tokens):
            bar.close()  # experts may still be read, but the terminal is the text's now
            num_tokens += 1
            out.write(token.text)
            out.flush()
        wall_s = perf_counter() - begin_s
        out.write("\n")
        out.flush()
        return Generated(num_tokens, wall_s, engine.statistics())


def generate(
    model: Path,
    /,
    *,
    prompt: str | None = None,
    prompt_file: Path | None = None,
    max_tokens: PositiveInt = 64,
    chat: Annotated[bool, Parameter(negative="")] = False,
    flags: Flags = NO_FLAGS,
) -> int:
    """Continue a prompt: text to stdout as it comes, log entries and statistics to stderr.

    For example:

    `expertstream generate ./model --prompt "def main():" --slots 50%`

    `expertstream generate ./model --prompt-file question.txt --chat --max-tokens 400 --slots 24GiB`

    `expertstream generate ./model --prompt "Once" --speculate 1 --log-file run.jsonl 2>/dev/null`

    Args:
        model: Directory with config.json, safetensors files and a tokenizer.
        prompt: Text to continue.
        prompt_file: File that holds the text to continue, in UTF-8.
        max_tokens: Most tokens to generate.
        chat: Put the prompt through the model's chat template as a user's message.
    """
    flags.check()
    generation = Generation(
        model=model, prompt=_prompt_text(prompt, prompt_file), max_tokens=max_tokens, chat=chat, flags=flags.for_open()
    )
    return run_one_shot(partial(_generate, generation))


async def _generate(generation: Generation) -> int:
    await stream_text(generation, sys.stdout)
    return ExitCode.OK


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give either --prompt or --prompt-file")
    if prompt_file is None:
        assert prompt is not None
        return prompt
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"cannot read the prompt from {prompt_file}: {exc}") from exc
