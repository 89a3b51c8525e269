"""`expertstream config`: every setting, its value, where the value came from and when it latches."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from ..settings import Resolved, describe
from .failures import ExitCode
from .flags import NO_FLAGS, Flags

__all__ = ["config"]


def config(
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    flags: Flags = NO_FLAGS,
) -> int:
    """Show every setting, its value, where the value came from and when it latches.

    For example:

    `expertstream config`

    `EXPERTSTREAM_SLOTS=50% expertstream config --config-file expertstream.toml --json`

    Args:
        as_json: Print a JSON array with an object for each setting.
    """
    resolved = flags.check()
    for warning in resolved.warnings:
        print(f"expertstream: warning: {warning}", file=sys.stderr)
    print(json.dumps([asdict(row) for row in describe(resolved)], indent=2) if as_json else _table(resolved))
    return ExitCode.OK


def _table(resolved: Resolved) -> str:
    """Returns aligned columns without colour or borders, which `grep` and `awk` read as well as a person does."""
    rows = [("setting", "value", "source", "latches")]
    rows += [(row.name, row.value, row.source, row.latches) for row in describe(resolved)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
