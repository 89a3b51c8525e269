"""`expertstream demo`: a small model with half of its experts resident, and what that came to, for a person."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from .failures import ExitCode, UsageError
from .flags import NO_FLAGS, Flags
from .generate import Generated, Generation, PositiveInt, stream_text
from .one_shot import run_one_shot

__all__ = ["demo", "summary_rows"]

_MODEL = Path("tests", "models", "tiny-qwen3_5-moe")
_PROMPT = 'def read_file(path, encoding="utf-8"):\n    """'
# No periodic statistics: their entries would stand in the middle of the text.
_FLAGS: dict[str, object] = {"slots": "50%", "speculate": 1, "stats_every": 0}


def demo(model: Path | None = None, /, *, max_tokens: PositiveInt = 64, flags: Flags = NO_FLAGS) -> int:
    """Generate from a small model with half of its experts resident, and show what the streaming did.

    For example:

    `expertstream demo`

    `expertstream demo ./model --slots 25% --speculate 0`

    Args:
        model: Directory of the model; else the test model of the checkout.
        max_tokens: Most tokens to generate.
    """
    flags.check()
    generation = Generation(
        model=_model(model), prompt=_PROMPT, max_tokens=max_tokens, chat=False, flags=_FLAGS | flags.for_open()
    )
    return run_one_shot(partial(_demo, generation))


def _model(given: Path | None) -> Path:
    if given is not None:
        return given
    # A checkout that is installed in place is the package, so its tests lie beside this folder's parent.
    for root in (Path.cwd(), Path(__file__).parents[2]):
        if (root / _MODEL / "config.json").is_file():
            return root / _MODEL
    raise UsageError(f"there is no {_MODEL.as_posix()} here: run it in a checkout, or name a model's directory")


async def _demo(generation: Generation) -> int:
    generated = await stream_text(generation, sys.stdout, shows_prompt=True)
    _print_summary(generated)
    return ExitCode.OK


def summary_rows(generated: Generated) -> list[tuple[str, str]]:
    """Returns what the demo shows: counters as they are, and the two rates that a reader makes of them."""
    counts = generated.statistics
    by_kind = ", ".join(f"{kind} {number}" for kind, number in counts.steps_by_kind.items() if number)
    return [
        ("steps", f"{counts.steps} ({by_kind})"),
        (
            "tokens generated",
            f"{generated.num_tokens} ({_rate(generated.num_tokens, generated.wall_s, '.1f')} a second)",
        ),
        ("drafts accepted", f"{counts.tokens_accepted} of {counts.tokens_drafted}"),
        ("expert lookups", f"{counts.lookups}"),
        ("hits", f"{counts.hits} ({_rate(counts.hits, counts.lookups, '.1%')} of lookups)"),
        ("joins", f"{counts.joins}"),
        ("misses", f"{counts.misses}"),
        ("copied to the device", f"{counts.bytes:,} bytes"),
    ]


def _rate(numerator: float, denominator: float, form: str) -> str:
    return format(numerator / denominator, form) if denominator else "none"


def _print_summary(generated: Generated) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="what streaming did", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for row in summary_rows(generated):
        table.add_row(*row)
    Console(stderr=True).print(table)
