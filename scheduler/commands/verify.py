"""`expertstream verify`: the same tokens, whatever is resident, shown on the user's own machine."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from .failures import ExitCode
from .flags import NO_FLAGS, Flags
from .one_shot import run_one_shot

__all__ = ["verify"]

_Switch = Annotated[bool, Parameter(negative="")]


def verify(
    model: Path,
    /,
    *,
    per_layer: _Switch = False,
    as_json: Annotated[_Switch, Parameter(name="--json")] = False,
    flags: Flags = NO_FLAGS,
) -> int:
    """Check that streaming does not change what the model says; the exit code is 1 where it does.

    For example:

    `expertstream verify ./model`

    `expertstream verify ./model --per-layer --slots 25% --json`

    Args:
        model: Directory with config.json, safetensors files and a tokenizer.
        per_layer: Compare each decoder layer too.
        as_json: Print the report as one JSON object; what happens meanwhile goes to stderr.
    """
    flags.check()
    return run_one_shot(partial(_verify, model, per_layer, as_json, flags.for_open()))


async def _verify(model: Path, per_layer: bool, as_json: bool, settings: dict[str, object]) -> int:
    from ..verify import verify as verify_model

    told = sys.stderr if as_json else sys.stdout
    found = await verify_model(
        model,
        per_layer=per_layer,
        settings=settings,
        report=lambda line: print(line, file=told, flush=True),
        log_stream=sys.stderr,
    )
    if as_json:
        print(json.dumps(found.as_dict(), allow_nan=False))
    return ExitCode.OK if found.passed else ExitCode.FAILED
