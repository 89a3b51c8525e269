"""`expertstream report`: what earlier runs did, from their logs, and whether their figures reconcile."""

from __future__ import annotations

import json
import sys
from typing import Annotated

from cyclopts import Parameter

from .failures import ExitCode, UsageError

__all__ = ["report"]

_Switch = Annotated[bool, Parameter(negative="")]


def report(
    *logs: Annotated[str, Parameter(name="LOG", allow_leading_hyphen=True)],
    check: _Switch = False,
    as_json: Annotated[_Switch, Parameter(name="--json")] = False,
) -> int:
    """Show what earlier runs did, from their logs; with --check the exit code is 1 where a log breaks a promise.

    For example:

    `expertstream report worker.jsonl worker.jsonl.1.gz --check`

    `expertstream report - --json < worker.jsonl`

    Args:
        logs: JSON-lines logs, plain or compressed with gzip; "-" is stdin. Give all logs of a process together.
        check: Look for counters that do not reconcile, entries that are missing, double or out of place, and damage.
        as_json: Print the report as one JSON object.
    """
    from ..report.reading import read_logs
    from ..report.sections import sections_of
    from ..report.summary import as_values
    from ..report.text import write_sections

    if not logs:
        raise UsageError("report needs a log: a file of JSON lines, or - for stdin")
    try:
        found = read_logs(logs)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    values = as_values(found, is_checked=check)
    if as_json:
        print(json.dumps(values, allow_nan=False))
    else:
        write_sections(sections_of(values), sys.stdout)
        if not check and values["num_violations"]:
            print(f"{values['num_violations']} violations: --check lists them")
    return ExitCode.FAILED if check and values["num_violations"] else ExitCode.OK
