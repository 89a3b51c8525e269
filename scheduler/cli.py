"""The command line `expertstream`: reads arguments, calls one command, and turns what it raised into an exit code.

Exit codes: 0 done; 1 failed, or `verify` found a difference; 2 usage or configuration; 3 the model is not valid;
4 the engine died; 130 and 143 stopped by Ctrl-C and by SIGTERM, after a clean close.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App

from .commands.config import config
from .commands.demo import demo
from .commands.failures import report_failure
from .commands.flags import with_switch_values
from .commands.generate import generate
from .commands.report import report
from .commands.verify import verify

__all__ = ["main"]

_HELP = """Run a Mixture-of-Experts model whose experts do not fit on the device.

For example:

`expertstream demo`

`expertstream generate ./model --prompt "def main():" --slots 24GiB`

`expertstream verify ./model --slots 25%`

`expertstream config`
"""


def _version() -> str:
    from expertstream import __version__

    return __version__


def _app() -> App:
    app = App(name="expertstream", help=_HELP, version=_version, result_action="return_value")
    for command in (generate, verify, config, demo, report):
        app.command(command)
    return app


def _open_standard_streams() -> None:
    """Puts the null device where the process was started without stdin, stdout or stderr (`>&-`, some daemons).

    A file opened later would get the number, and be written to by whoever prints; uvloop aborts the process then.
    """
    for number in range(3):  # in this order: the lowest free number is the one that is given
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the process


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; None is those of the process.

    Returns:
        The exit code, as listed above.
    """
    if argv is None:
        _open_standard_streams()
        # The process is ours: plain text and bars of transformers would stand between the log entries on stderr.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TQDM_DISABLE", "1")
    arguments = sys.argv[1:] if argv is None else argv
    try:
        tokens = list(with_switch_values(arguments))
        result = _app()(tokens, exit_on_error=False, print_error=False)
        sys.stdout.flush()  # here a reader that went away is an exit code; at the interpreter's exit it is a traceback
    except KeyboardInterrupt:
        return 130
    except Exception as exc:
        return report_failure(exc)
    return result if isinstance(result, int) else 0  # --help and --version return nothing
