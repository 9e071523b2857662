"""Find a session's commit and shard, and the command that accepts its figures on another machine.

They come from git, and from the variables that CI providers document: GitHub's "Variables
reference", GitLab's "Predefined CI/CD variables reference".
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.files.git import (
    GitError,
    OutsideRepositoryError,
    path_in_repository,
    repository_root,
    run_git,
)
from pytest_gpumem.report.model import MAX_SHARDS, Origin, Shard
from pytest_gpumem.session.settings import in_ci

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.session.settings import Settings

SPLITS: Final = (("splits", "group", 0), ("num_shards", "shard_id", 1))
"""options of pytest-split and pytest-shard: the number of shards, this shard's number, and the
addend that makes the first number 1"""
_PULL_REQUEST: Final = re.compile(r"refs/pull/\d+/merge")


def shard_of(get: Callable[[str], object]) -> Shard | None:
    """Return which shard of its suite a session runs; None if neither options nor CI name one.

    ``get`` returns the value of a pytest option, None if pytest has no such option.
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
    """Return where a session ran, for its report; what it collected is filled in later."""
    checkout = checkout_of(root)
    top = root if checkout is None else checkout.top
    folder = Path(os.path.relpath(os.path.realpath(settings.baseline_dir), os.path.realpath(top)))
    place = "" if os.pardir in folder.parts else folder.as_posix()
    commit = "" if checkout is None else checkout.commit
    head = ""
    if checkout is not None and commit:
        # GitLab sets this variable in merged results pipelines.
        head = os.environ.get("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA", "")
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

    In GitHub Actions it names the run, by the variables of GitHub's "Variables reference";
    elsewhere it names the report in CI's artifact, and is "" if the artifact's name is unknown.
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

    It needs the session's JSON report, so CI must keep that file.
    """
    if settings.json is None:
        return ""
    command = accept_command(settings.json.name, settings.artifact)
    if command or not in_ci():
        return command
    return shlex.join(["gpumem", "accept", settings.json.name])


@dataclass(frozen=True)
class Checkout:
    """A git working tree."""

    top: Path
    """the repository's top folder"""
    commit: str
    """"" before the first commit"""

    def has(self, commit: str) -> bool:
        """Return whether the repository has a commit; only a full hash is passed to git."""
        if not re.fullmatch(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", commit):
            return False
        try:
            run_git("-C", str(self.top), "cat-file", "-e", f"{commit}^{{commit}}")
        except GitError:
            return False
        return True

    def place(self, folder: Path) -> str:
        """Return a folder's path relative to ``top``; "" for ``top`` or a folder outside."""
        try:
            return path_in_repository(folder, self.top)
        except OutsideRepositoryError:
            return ""

    def merged_parent(self) -> str:
        """Return the commit's second parent; "" if the commit is not a merge of two.

        Reads the commit object, which names its parents even in a shallow clone that lacks them.
        """
        try:
            content = run_git("-C", str(self.top), "cat-file", "commit", self.commit)
        except GitError:
            return ""
        head = content.partition(b"\n\n")[0].decode(errors="replace").splitlines()
        parents = [line.split()[1] for line in head if line.startswith("parent ")]
        return parents[1] if len(parents) == 2 else ""  # noqa: PLR2004 - a merge of two

    def is_modified(self, but: str) -> bool:
        """Return whether a tracked file outside the folder ``but`` differs from the commit."""
        excluded = (f":(top,exclude,literal){but}",) if but else ()
        question = ("status", "--porcelain", "--untracked-files=no", "--", ":/", *excluded)
        try:
            return bool(run_git("-C", str(self.top), *question).strip())
        except GitError:
            return False


def checkout_of(folder: Path) -> Checkout | None:
    """Return the working tree around a folder; None outside any, or without git."""
    try:
        top = repository_root(folder)
    except GitError:
        return None
    try:
        commit = run_git("-C", str(top), "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    except GitError:
        return Checkout(top, "")
    return Checkout(top, os.fsdecode(commit).strip())
