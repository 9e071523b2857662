"""The commit that is checked out: by it a report's figures are known on another machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.baselines.git import (
    GitError,
    OutsideRepositoryError,
    path_in_repository,
    repository_root,
    run_git,
)

if TYPE_CHECKING:
    from pathlib import Path


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
