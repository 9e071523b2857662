"""List the releases of a package between two versions, according to a package index.

Upload times are in an index's JSON from version 1.1 of the "Simple repository API" on
(packaging.python.org); PyPI has them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from datetime import datetime, timedelta, timezone
from functools import cache
from importlib.machinery import PathFinder
from typing import Final, NamedTuple

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import VERSION_PATTERN, InvalidVersion, Version

from pytest_gpumem.errors import SpecError

_UNREACHED: Final = re.compile(r"Retry\(total=0\b.* after connection broken by (.+)")
"""pip's warning after its last try to reach an index"""


_PEP_440: Final = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)
INDEX: Final = "https://pypi.org/simple"
JSON: Final = "application/vnd.pypi.simple.v1+json"
LATER: Final = timedelta(days=1)
"""maximum time between the uploads of packages that are released together, in either order"""
TIMEOUT: Final = 60
"""seconds to wait for the index's response"""


class Candidates(NamedTuple):
    """The releases of a package from a good one to a bad one."""

    versions: list[str]
    """the two versions and those between them, from the good one to the bad one"""
    falls: bool
    """whether the bad version is the older one: a later version needs less memory"""


def releases_between(package: str, good: str, bad: str) -> Candidates:
    """Return a package's releases from the good one to the bad one."""
    for name in (good, bad):
        if not _PEP_440.fullmatch(name.strip()):
            raise SpecError(
                f"{package} {name}", f"{name!r} is not a version", "write for example 4.44.2"
            )
    first, last = sorted(map(Version, (good, bad)))
    if first == last:
        remedy = "name a release with more memory"
        raise SpecError(f"{package} {good} {bad}", "these are the same release", remedy)
    listed = offered_releases(package, prereleases=first.is_prerelease or last.is_prerelease)
    versions = {Version(name): name for name in listed}
    for name in (good, bad):
        if Version(name) not in versions:
            newest = ", ".join(str(offered) for offered in sorted(versions)[-5:])
            raise SpecError(
                f"{package} {name}",
                "the package index has no such release for this Python",
                f"choose one of its releases, such as {newest or 'pip index versions prints them'}",
            )
    # A build such as 2.13.0+cpu, from another index, is not a release of its own.
    releases = sorted(
        offered for offered in versions if offered.local is None or offered in {first, last}
    )
    between = [versions[version] for version in releases if first <= version <= last]
    falls = Version(good) != first
    return Candidates(between[::-1] if falls else between, falls)


def offered_releases(package: str, *, prereleases: bool) -> list[str]:
    """List all releases that pip finds for this Python, by ``pip index versions``."""
    if PathFinder.find_spec("pip") is None:  # avoids setuptools' finder, which warns
        problem = f"{sys.executable} has no pip, which lists the releases"
        raise SpecError("gpumem bisect", problem, "run python -m ensurepip")
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    process = subprocess.run(
        [*command, *(["--pre"] if prereleases else [])], capture_output=True, text=True, check=False
    )
    unreached = _UNREACHED.findall(process.stderr)
    if unreached:  # even if a folder of wheels has some releases: the list would be incomplete
        problem = f"pip cannot reach the package index ({unreached[-1]})"
        remedy = "connect to the network, or correct pip's proxy or index, and repeat the command"
        raise SpecError(f"gpumem bisect {package}", problem, remedy)
    line = re.search(r"^Available versions: (.*)$", process.stdout, re.MULTILINE)
    if line is None:
        errors = [text for text in process.stderr.splitlines() if text.startswith("ERROR")]
        problem = "pip finds no release of this package" + (f" ({errors[-1]})" if errors else "")
        raise SpecError(package, problem, "correct the name, or pip's index")
    versions = line.group(1).split(", ")
    # Very old releases may have a version that PEP 440 does not allow.
    return [version for version in versions if _PEP_440.fullmatch(version)]


def release_of_the_day(package: str, version: str, neighbour: str) -> str:
    """Return the newest release of ``neighbour`` up to a day after a release of ``package``."""
    given = f"--as-of {neighbour}"
    dates = _upload_times(package, given)
    uploaded = dates.get(Version(version))
    if uploaded is None:
        problem = "the index does not tell when this release was uploaded"
        remedy = f"leave out this option, and pin a release: --with '{neighbour}==1.0'"
        raise SpecError(f"{given} {package} {version}", problem, remedy)
    earlier = [
        release
        for release, when in _upload_times(neighbour, given).items()
        if when <= uploaded + LATER
    ]
    finals = [release for release in earlier if not release.is_prerelease]
    if not earlier:
        raise SpecError(
            given,
            f"{neighbour} had no release when {package} {version} was uploaded "
            f"({uploaded:%Y-%m-%d})",
            "leave out this option",
        )
    return str(max(finals or earlier))


@cache
def _upload_times(package: str, given: str) -> dict[Version, datetime]:
    """Return when each release was first uploaded; yanked files do not count."""
    named = os.environ.get("PIP_INDEX_URL", "")
    if not named:
        command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        named = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    address = f"{(named or INDEX).rstrip('/')}/{canonicalize_name(package)}/"
    request = urllib.request.Request(address, headers={"Accept": JSON})  # noqa: S310 - pip's own
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310
            files = json.load(answer)["files"]
    except (OSError, ValueError, KeyError) as error:
        raise SpecError(
            given,
            f"the package index does not tell upload times at {address} ({error})",
            "connect to the network, set PIP_INDEX_URL to an index that tells them, as PyPI does, "
            "or leave out this option",
        ) from error
    times: dict[Version, datetime] = {}
    for file in files:
        name, when = file["filename"], file.get("upload-time")
        parse = parse_wheel_filename if name.endswith(".whl") else parse_sdist_filename
        try:
            version = parse(name)[1]
        except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
            continue
        if when and not file.get("yanked"):
            # Python 3.10 parses no "Z", and only fractions of three or six digits.
            seconds = when.removesuffix("Z").partition(".")[0]
            uploaded = datetime.fromisoformat(seconds).replace(tzinfo=timezone.utc)
            times[version] = min(uploaded, times.get(version, uploaded))
    return times
