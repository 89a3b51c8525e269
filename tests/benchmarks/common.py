"""What every benchmark prints besides its figures: versions, machine, date, commit and the command that gives it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["parse", "publish"]


def parse(description: str | None, **options: Any) -> argparse.Namespace:
    """Parse `--name value` options, each an int, float or str default, and `--output FILE`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, help="also write the result to this file")
    for name, default in options.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return parser.parse_args()


def publish(name: str, arguments: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print the result as one JSON object, and write it to `--output`."""
    shown = [Path(sys.argv[0]).as_posix(), *(a for a in sys.argv[1:] if a != "--output" and a != str(arguments.output))]
    result = {
        "benchmark": name,
        "command": "python " + shlex.join(shown),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {"system": platform.system(), "processor": _processor(), "cores": os.cpu_count()},
        **figures,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    found = {}
    for name in ("expertstream", "torch", "transformers", "numpy", "anyio", "uvloop", "cupy-cuda13x"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    return (done.stdout.strip() or "unknown") + (" with changes" if changed.strip() else "")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
