"""`python -m expertstream`: the command line."""

from __future__ import annotations

import sys

from expertstream.scheduler.cli import main

if __name__ == "__main__":
    sys.exit(main())
