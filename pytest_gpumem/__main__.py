"""``python -m pytest_gpumem``: the gpumem command, if its script is not on PATH."""

from __future__ import annotations

import sys

from pytest_gpumem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
