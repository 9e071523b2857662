"""The versions between two: releases that a package index has, or commits of a git repository."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from pytest_gpumem.baselines.git import GitError, run_git
from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


def releases_between(package: str, good: str, bad: str, *, prereleases: bool = False) -> list[str]:
    """Return the releases of a package from one to another, oldest first.

    Args:
        package: its name on the index.
        good: the older release.
        bad: the newer release.
        prereleases: whether release candidates and nightly builds count as well.

    Raises:
        SpecError: a version that is none, that the index does not have, or in the wrong order.
    """
    first, last = (_version(package, text) for text in (good, bad))
    if first >= last:
        raise SpecError(
            f"{package} {good} {bad}",
            "the first release has to be older than the second",
            "name the release without the growth first",
        )
    wanted = prereleases or first.is_prerelease or last.is_prerelease
    listed = offered_releases(package, prereleases=wanted)
    versions = {Version(text): text for text in listed}
    for version, text in ((first, good), (last, bad)):
        if version not in versions:
            newest = ", ".join(str(it) for it in sorted(versions)[-5:])
            raise SpecError(
                f"{package} {text}",
                "the package index has no such release for this Python",
                f"choose one of its releases, as {newest or 'pip index versions prints them'}",
            )
    return [versions[version] for version in sorted(versions) if first <= version <= last]


def offered_releases(package: str, *, prereleases: bool) -> list[str]:
    """Return all releases that pip finds for this Python, by ``pip index versions``.

    Raises:
        SpecError: there is no pip, or it knows no such package.
    """
    if find_spec("pip") is None:
        raise SpecError(
            "gpumem bisect",
            f"{sys.executable} has no pip to ask for releases",
            "python -m ensurepip, or name the releases: --versions 4.44.0,4.45.0,4.46.0",
        )
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    process = subprocess.run(
        [*command, *(["--pre"] if prereleases else [])],
        capture_output=True,
        text=True,
        check=False,
    )
    line = re.search(r"^Available versions: (.*)$", process.stdout, re.MULTILINE)
    if line is None:
        errors = [text for text in process.stderr.splitlines() if text.startswith("ERROR")]
        raise SpecError(
            package,
            "pip finds no releases of it" + (f" ({errors[-1]})" if errors else ""),
            "correct the name, or name the releases: --versions 4.44.0,4.45.0,4.46.0",
        )
    return _valid_versions(line.group(1).split(", "))


def _valid_versions(texts: Iterable[str]) -> list[str]:
    versions = []
    for text in texts:
        try:
            Version(text)
        except InvalidVersion:  # of years ago
            continue
        versions.append(text)
    return versions


def named_releases(package: str, names: str) -> list[str]:
    """Return the releases that an option names, "4.44.0,4.45.0", oldest first.

    Raises:
        SpecError: a name that is no version, or fewer than two.
    """
    texts = list(dict.fromkeys(filter(None, map(str.strip, names.split(",")))))
    if len(texts) < len(("good", "bad")):
        raise SpecError(
            f"--versions={names}", "that is not a list of versions", "write 4.44.0,4.45.0,4.46.0"
        )
    return sorted(texts, key=lambda text: _version(package, text))


def _version(package: str, text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise SpecError(
            f"{package} {text}", f"{text!r} is not a version", "write for example 4.44.2"
        ) from None


def commits_between(repository: Path, good: str, bad: str) -> list[str]:
    """Return the commits from one to another along first parents, oldest first, with both ends.

    Raises:
        SpecError: git does not know them, or the first is no ancestor of the second.
    """
    try:
        first, last = (_commit(repository, name) for name in (good, bad))
        listed = run_git(
            *("-C", str(repository), "rev-list", "--first-parent", "--reverse"),
            *("--ancestry-path", f"{first}..{last}"),
        )
    except GitError as error:
        raise SpecError(
            f"--git {repository} {good} {bad}", str(error), "name a repository and two commits"
        ) from error
    commits = listed.decode().split()
    if not commits:
        raise SpecError(
            f"--git {repository} {good} {bad}",
            "the first commit does not lead to the second",
            "name the commit without the growth first",
        )
    return [first, *commits]


def _commit(repository: Path, name: str) -> str:
    if name.startswith("-"):
        raise GitError(f"{name!r} is not a commit")
    arguments = ("-C", str(repository), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    try:
        return run_git(*arguments).decode().strip()
    except GitError as error:
        if "status" in str(error):  # what git says is nothing, with --quiet
            raise GitError(f"git knows no commit {name!r}") from None
        raise


def titles_of(repository: Path, commits: Sequence[str]) -> dict[str, str]:
    """Return each commit's title for a reader: its short hash, the first line of its message."""
    names = "".join(f"{commit}\n" for commit in commits).encode()
    log = run_git(
        *("-C", str(repository), "log", "--no-walk=unsorted", "--stdin", "--format=%H %h %s"),
        stdin=names,
    )
    lines = (line.partition(" ") for line in log.decode(errors="replace").splitlines())
    return {commit: title for commit, _, title in lines}
