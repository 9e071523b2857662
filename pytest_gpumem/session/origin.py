"""Where a session runs: its commit, its shard, and the command that accepts its figures elsewhere.

All of it comes of git and of variables that the makers of CI document: GitHub's "Variables
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


@dataclass(frozen=True)
class Checkout:
    """A working tree of git."""

    top: Path
    """the top folder of the repository"""
    commit: str
    """"" before the first commit"""

    def has(self, commit: str) -> bool:
        """Return whether the repository has a commit; no text that names none is given to git."""
        if not re.fullmatch(r"[0-9a-f]{40}(?:[0-9a-f]{24})?", commit):
            return False
        try:
            run_git("-C", str(self.top), "cat-file", "-e", f"{commit}^{{commit}}")
        except GitError:
            return False
        return True

    def place(self, folder: Path) -> str:
        """Return a folder's path from the top; "" of the top itself, and of one outside."""
        try:
            return path_in_repository(folder, self.top)
        except OutsideRepositoryError:
            return ""

    def merged_parent(self) -> str:
        """Return the second parent of the commit; "" where it is no merge of two.

        The commit itself names its parents, also in a shallow clone, which does not have them.
        """
        try:
            content = run_git("-C", str(self.top), "cat-file", "commit", self.commit)
        except GitError:
            return ""
        head = content.partition(b"\n\n")[0].decode(errors="replace").splitlines()
        parents = [line.split()[1] for line in head if line.startswith("parent ")]
        return parents[1] if len(parents) == 2 else ""  # noqa: PLR2004 - a merge of two

    def is_modified(self, but: str) -> bool:
        """Return whether a known file outside the folder ``but`` differs from the commit."""
        excluded = (f":(top,exclude,literal){but}",) if but else ()
        question = ("status", "--porcelain", "--untracked-files=no", "--", ":/", *excluded)
        try:
            return bool(run_git("-C", str(self.top), *question).strip())
        except GitError:
            return False


def checkout_of(folder: Path) -> Checkout | None:
    """Return the working tree that a folder lies in; None outside of any, or without git."""
    try:
        top = repository_root(folder)
    except GitError:
        return None
    try:
        commit = run_git("-C", str(top), "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
    except GitError:
        return Checkout(top, "")
    return Checkout(top, os.fsdecode(commit).strip())
