"""The command that accepts the figures of a run in CI on another machine."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def accept_command(report: str, artifact: str) -> str:
    """Return the command; "" where nothing says under which name CI keeps the report.

    Of a run of GitHub Actions it names the run, by the variables of GitHub's "Variables reference".
    """
    variables = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run = (os.environ.get(name, "") for name in variables)
    if os.environ.get("GITHUB_ACTIONS") == "true" and all((server, repository, run)):
        words = ["--run", f"{server}/{repository}/actions/runs/{run}"]
        words += ["--artifact", artifact] if artifact else []
        return shlex.join(["gpumem", "accept", *words])
    return shlex.join(["gpumem", "accept", str(Path(artifact, report))]) if artifact else ""
