"""The release that one package had when a release of another was uploaded, as the index tells it.

An index tells each file's upload time in its JSON (packaging.python.org, "Simple repository API",
since version 1.1); PyPI does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Final

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from pytest_gpumem.errors import SpecError

INDEX: Final = "https://pypi.org/simple"
JSON: Final = "application/vnd.pypi.simple.v1+json"
LATER: Final = timedelta(days=1)
"""two packages of one release are uploaded within this time, either of them first"""
TIMEOUT: Final = 60
"""seconds to wait for an answer of the index"""


def release_of_the_day(package: str, version: str, neighbour: str) -> str:
    """Return the newest release of another package, at most a day younger than a package's."""
    asked = f"--as-of {neighbour}"
    dates = _upload_times(package, asked)
    uploaded = dates.get(Version(version))
    if uploaded is None:
        problem = "the index does not tell when this release was uploaded"
        remedy = f"leave out this option, and pin a release: --with '{neighbour}==1.0'"
        raise SpecError(f"{asked} {package} {version}", problem, remedy)
    earlier = [
        release
        for release, when in _upload_times(neighbour, asked).items()
        if when <= uploaded + LATER
    ]
    finals = [release for release in earlier if not release.is_prerelease]
    if not earlier:
        raise SpecError(
            asked,
            f"{neighbour} had no release when {package} {version} was uploaded "
            f"({uploaded:%Y-%m-%d})",
            "leave out this option",
        )
    return str(max(finals or earlier))


@cache
def _upload_times(package: str, asked: str) -> dict[Version, datetime]:
    """Return when each release was uploaded first; without those that were withdrawn."""
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
            asked,
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
            # Python 3.10 reads no "Z", and fractions of three or six digits only.
            seconds = when.removesuffix("Z").partition(".")[0]
            uploaded = datetime.fromisoformat(seconds).replace(tzinfo=timezone.utc)
            times[version] = min(uploaded, times.get(version, uploaded))
    return times
