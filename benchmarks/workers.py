"""Running a script's rows in a process of another interpreter, with this checkout's package."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from typing import Any

from provenance import ROOT


def ask_worker(
    python: str, script: str, *words: str, timeout: float | None = None, **environment: str
) -> Any:  # noqa: ANN401 - what the worker prints
    """Return the JSON of the last line that a worker prints.

    Args:
        python: its interpreter.
        script: the calling script, which prints that where it is told to.
        words: its arguments.
        timeout: seconds, after which ``subprocess.TimeoutExpired`` is raised.
        environment: variables; PYTHONPATH comes after this checkout.
    """
    path = environment.pop("PYTHONPATH", os.environ.get("PYTHONPATH"))
    places = os.pathsep.join(filter(None, [str(ROOT), path]))
    done = subprocess.run(
        [python, script, *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=timeout,
        env={**os.environ, **environment, "PYTHONPATH": places},
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def errors_by_group(groups: dict[str, list[float]]) -> list[str]:
    """Return a line for each group of rows: the median and the worst of its errors in percent."""
    return [
        f"{group}: {len(errors)} rows, median {statistics.median(errors):.2f} %, "
        f"worst {max(errors):.2f} %"
        for group, errors in sorted(groups.items())
    ]
