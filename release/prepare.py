"""Makes a release ready to be pushed: its commit, its tag and its archives.

    python release/prepare.py 0.2.0

It looks whether the names are free on the package index, writes the version and the date where they
stand, commits that beside the checked out files (in a worktree of git's), and has release/build.sh
build and try the archives from the commit. Only then is the branch moved, and the tag made. The two
commands that publish are printed, and not run.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
PROJECT = "pytest-gpumem"
COMMAND = "gpumem"
INDEX = "https://pypi.org/simple/"
SIMPLE_API = "application/vnd.pypi.simple.v1+json"
"""of "Simple repository API" in the Python Packaging User Guide"""


class ReleaseError(Exception):
    """What is in the way of a release, with what to do."""


class Edit(NamedTuple):
    """A place where a release is written down."""

    file: str
    pattern: str
    new: str
    """with {version} and {date}"""
    is_first: bool = False
    """only the first release has the place"""


ARCHIVE = r"https://github\.com/\S+/archive/main\.tar\.gz"
"""from where pip installs the package before the first release"""
EDITS = (
    Edit("pyproject.toml", r'(?m)^version = ".*"$', 'version = "{version}"'),
    Edit("release/recipe.yaml", r'(?m)^  version: ".*"$', '  version: "{version}"'),
    Edit("CITATION.cff", r"(?m)^version: .*$", "version: {version}"),
    Edit("CITATION.cff", r"(?m)^date-released: .*$", "date-released: {date}"),
    Edit("CHANGELOG.md", r"(?m)^## Unreleased$", "## {version} - {date}"),
    Edit("README.md", rf"pip install {ARCHIVE}", "pip install pytest-gpumem", is_first=True),
    Edit("README.md", r"You need Linux, a C compiler, and ", "You need Linux, and ", is_first=True),
    Edit(
        "docs/tutorial/gate-in-ci.md",
        rf"pip install {ARCHIVE} torchvision",
        "pip install pytest-gpumem torchvision",
        is_first=True,
    ),
    Edit(
        "docs/tutorial/gate-in-ci.md",
        rf"pytest-gpumem\[html\] @ {ARCHIVE}",
        "pytest-gpumem[html]",
        is_first=True,
    ),
)


def edited(files: dict[str, str], version: Version, date: str, *, first: bool) -> dict[str, str]:
    """Return the texts of a release.

    Args:
        files: the texts now, by name: of each file of ``EDITS``.
        version: of the release.
        date: "2026-11-23".
        first: there was none before.

    Raises:
        ReleaseError: a place is not there, or more than once.
    """
    texts = dict(files)
    for edit in EDITS:
        if edit.is_first and not first:
            continue
        new = edit.new.format(version=version, date=date)
        texts[edit.file], count = re.subn(edit.pattern, new, texts[edit.file])
        if count != 1:
            raise ReleaseError(
                f"{edit.file} has {count} places like {edit.pattern!r}, and has to have one: "
                "write it, or change EDITS in release/prepare.py"
            )
    return texts


def releases_of(name: str, index: str) -> list[str]:
    """Return the versions of a project on a package index; none: nobody has the name.

    Raises:
        ReleaseError: the index does not answer.
    """
    url = f"{index.rstrip('/')}/{name}/"
    try:
        request = urllib.request.Request(url, headers={"Accept": SIMPLE_API})  # noqa: S310 - the caller's
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            page = json.load(answer)
        return list(page["versions"])
    except urllib.error.HTTPError as error:
        if error.code == 404:  # noqa: PLR2004 - HTTP's
            return []
        raise ReleaseError(f"{url} answers {error.code} {error.reason}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReleaseError(
            f"{url} does not answer as a package index does ({error!r}): name one by --index"
        ) from error


def require_own_name(version: Version, on_index: list[str], tags: set[str]) -> None:
    """Refuse a name that is another's, and a version that is no newer than the last one.

    Raises:
        ReleaseError: what is in the way.
    """
    foreign = [release for release in on_index if f"v{release}" not in tags]
    if foreign:
        raise ReleaseError(
            f"the index has {PROJECT} {', '.join(foreign)}, and this repository has no tag "
            f"v{foreign[0]}: the name is another's, or the tags were not fetched (git fetch --tags)"
        )
    own = [Version(tag[1:]) for tag in tags if re.fullmatch(r"v\d[\w.]*", tag)]
    if own and version <= max(own):
        raise ReleaseError(
            f"{version} is not newer than {max(own)}, the last release: give a later version"
        )


def git(*arguments: str, folder: Path) -> str:
    """Run git and return what it prints.

    Raises:
        ReleaseError: with git's own words.
    """
    done = subprocess.run(
        ("git", "-C", folder, *arguments),  # noqa: S607 - the user's git
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ReleaseError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def prepare(version: Version, *, root: Path, index: str, build: tuple[str, ...], dist: Path) -> str:
    """Make the commit, the archives and the tag; return what to type then.

    Raises:
        ReleaseError: nothing was changed.
    """
    if git("status", "--porcelain", "--untracked-files=no", folder=root):
        raise ReleaseError("some files are changed and not committed: commit them first")
    branch = git("symbolic-ref", "--short", "HEAD", folder=root)
    tags = set(git("tag", "--list", "v*", folder=root).split())
    require_own_name(version, releases_of(PROJECT, index), tags)
    others = releases_of(COMMAND, index)
    if others:
        print(
            f"note: the index has another project named {COMMAND} ({others[-1]}); its command and "
            "ours have one name. docs/reference/commands.md says what to do",
            file=sys.stderr,
        )
    date = dt.datetime.now(dt.timezone.utc).date().isoformat()
    names = {edit.file for edit in EDITS}
    files = {name: (root / name).read_text(encoding="utf-8") for name in names}
    texts = edited(files, version, date, first=not tags)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git("worktree", "add", "--quiet", "--detach", str(tree), folder=root)
        try:
            for name, text in texts.items():
                (tree / name).write_text(text, encoding="utf-8")
            git("commit", "--quiet", "--all", "--message", f"Release {version}", folder=tree)
            commit = git("rev-parse", "HEAD", folder=tree)
            if subprocess.run([*build, str(dist)], cwd=tree, check=False).returncode:
                raise ReleaseError(
                    f"{' '.join(build)} failed, as it printed above: no commit and no tag was made"
                )
        finally:
            git("worktree", "remove", "--force", str(tree), folder=root)
    git("merge", "--quiet", "--ff-only", commit, folder=root)
    git("tag", "--annotate", f"v{version}", "--message", f"Release {version}", folder=root)
    return (
        f"{PROJECT} {version} is ready: its commit on {branch}, the tag v{version}, archives in "
        f"{dist}. To publish it:\n\n"
        f"    git push --atomic origin {branch} v{version}\n"
        f"    python -m twine upload {dist}/*.whl {dist}/*.tar.gz\n\n"
        f"To take it back: git tag -d v{version} && git reset --keep HEAD~1"
    )


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="of the release, as 0.2.0")
    parser.add_argument("--index", default=INDEX, help="a package index (default: %(default)s)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the archives")
    options = parser.parse_args()
    try:
        version = Version(options.version)
        build = ("bash", "release/build.sh")
        dist = options.dist.resolve()
        print(prepare(version, root=ROOT, index=options.index, build=build, dist=dist))
    except InvalidVersion:
        print(f"error: {options.version!r} is no version: give one as 0.2.0", file=sys.stderr)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
