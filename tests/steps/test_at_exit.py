"""What is halted when the interpreter ends."""

from __future__ import annotations

from pathlib import Path

from children import run_script

SCRIPT = """
import sys
from expertstream.steps.at_exit import halt_at_exit
from expertstream.steps.process import streaming_requested
from expertstream.steps.sink import LogSink

sink = LogSink(log_file=sys.argv[1], host=False)
streaming_requested(sink)

def say(word):
    return lambda: sink.record("halted", word=word)

def broken():
    raise RuntimeError("planted")

halt_at_exit(say("kept"))
halt_at_exit(broken)
forget = halt_at_exit(say("forgotten"))
forget()
forget()
"""


def test_halts_run_after_the_final_record_and_none_that_was_forgotten(tmp_path: Path) -> None:
    """The record comes first; a halt that raises stops neither the others nor the process."""
    child = run_script(tmp_path, SCRIPT)
    assert (child.rc, child.stderr) == (0, "")
    assert [(entry["event"], entry.get("word")) for entry in child.entries] == [
        ("streaming.requested", None),
        ("process.final", None),
        ("halted", "kept"),
    ]
