"""Where a session runs: its commit, its shard, and the command that accepts its figures elsewhere.

All of it comes of git and of variables that the makers of CI document: GitHub's "Variables
reference", GitLab's "Predefined CI/CD variables reference".
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.report.model import MAX_SHARDS, Origin, Shard
from pytest_gpumem.session.settings import in_ci

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.session.settings import Settings

SPLITS: Final = (("splits", "group", 0), ("num_shards", "shard_id", 1))
"""options of pytest-split and pytest-shard: how many shards, which of them, and the addend that
makes the first one's number 1"""
_PULL_REQUEST: Final = re.compile(r"refs/pull/\d+/merge")


def shard_of(get: Callable[[str], object]) -> Shard | None:
    """Return which shard of its suite a session is; None where nothing says that it is one.

    ``get`` returns the value of an option of pytest, None of one that is unknown.
    """
    pairs = [(get(index), get(count), shift) for count, index, shift in SPLITS]
    node, nodes = (os.environ.get(f"CI_NODE_{name}", "") for name in ("INDEX", "TOTAL"))
    job = os.environ.get("CI_JOB_NAME", "")
    if not job or job.endswith(f" {node}/{nodes}"):  # a job of GitLab's parallel:matrix is no shard
        pairs.append((node, nodes, 0))
    for index, count, shift in pairs:
        try:
            shard = Shard(int(str(index)) + shift, int(str(count)))
        except ValueError:
            continue
        if 1 <= shard.index <= shard.count <= MAX_SHARDS and shard.count > 1:
            return shard
    return None


def session_origin(root: Path, settings: Settings, shard: Shard | None) -> Origin:
    """Return where a session ran, for its report, without its collection."""
    from pytest_gpumem.baselines.checkout import checkout_of

    checkout = checkout_of(root)
    top = root if checkout is None else checkout.top
    folder = Path(os.path.relpath(os.path.realpath(settings.baseline_dir), os.path.realpath(top)))
    place = "" if os.pardir in folder.parts else folder.as_posix()
    commit = "" if checkout is None else checkout.commit
    head = ""
    if checkout is not None and commit:
        head = os.environ.get("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA", "")  # of GitLab's merged result
        if _PULL_REQUEST.fullmatch(os.environ.get("GITHUB_REF", "")):
            head = checkout.merged_parent()
    return Origin(
        commit=commit,
        head=head,
        modified=checkout is not None and bool(commit) and checkout.is_modified(place),
        root="" if checkout is None else checkout.place(root),
        folder=place,
        follow_provenance=settings.provenance == "fail",
        shard=shard,
        artifact=settings.artifact,
    )


def accept_command(report: str, artifact: str) -> str:
    """Return the command that accepts a report's figures on another machine.

    Of a run of GitHub Actions it names the run, by the variables of GitHub's "Variables reference";
    "" where nothing says under which name CI keeps the report.
    """
    variables = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, run = (os.environ.get(name, "") for name in variables)
    if os.environ.get("GITHUB_ACTIONS") == "true" and all((server, repository, run)):
        words = ["--run", f"{server}/{repository}/actions/runs/{run}"]
        words += ["--artifact", artifact] if artifact else []
        return shlex.join(["gpumem", "accept", *words])
    return shlex.join(["gpumem", "accept", str(Path(artifact, report))]) if artifact else ""


def session_accept_command(settings: Settings) -> str:
    """Return the command that accepts a session's figures on another machine; "" without one.

    CI has to keep the session's JSON report.
    """
    if settings.json is None:
        return ""
    command = accept_command(settings.json.name, settings.artifact)
    if command or not in_ci():
        return command
    return shlex.join(["gpumem", "accept", settings.json.name])
