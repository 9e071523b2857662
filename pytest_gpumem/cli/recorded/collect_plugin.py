"""A plugin for the session of pytest that ``gpumem prune`` starts: it writes a list of baselines.

It is loaded with ``-p``, and writes to the file that the environment names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "PYTEST_GPUMEM_COLLECTED"
"""the environment's name for the file"""


def pytest_terminal_summary(config: Any) -> None:  # noqa: ANN401 - pytest's, which stops above
    """Write the stale baselines, once all tests are collected."""
    from pytest_gpumem.plugin.stale_hooks import NAME

    watching = config.pluginmanager.get_plugin(NAME)
    if watching is None:  # there is no folder of baselines, or gpumem was switched off
        return
    collected = {
        "directory": str(watching.settings.baseline_dir),
        "partial": watching.collection.partial,
        "stale": [tuple(key) for key in watching.stale],
    }
    Path(os.environ[VARIABLE]).write_text(json.dumps(collected), encoding="ascii")
