"""Where things lie in the project."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
HELPERS = TESTS / "helpers"
GOLD = TESTS / "gold"
