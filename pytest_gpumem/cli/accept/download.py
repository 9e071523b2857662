"""Download the reports of a GitHub Actions run with the user's own ``gh``."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from pytest_gpumem.errors import ReportError
from pytest_gpumem.report.json_report import is_report

if TYPE_CHECKING:
    from collections.abc import Iterator

_URL: Final = re.compile(r"https://([\w.:-]+)/([\w.-]+)/([\w.-]+)/actions/runs/(\d+)(?:[/?#].*)?")
_BY_HAND: Final = "download the artifact in a browser, and name its JSON report"


@contextmanager
def downloaded(run: str, artifact: str) -> Iterator[tuple[Path, list[Path]]]:
    """Download a run's artifacts to a temporary folder; yield it with the reports in it.

    ``run`` is a URL, or a run's number in this repository; ``artifact`` is a name or a pattern.
    """
    match = _URL.fullmatch(run)
    if match is None and not (run.isascii() and run.isdigit()):
        remedy = "write it as https://github.com/OWNER/NAME/actions/runs/NUMBER"
        raise ReportError(f"--run={run}", "this is not the address of a GitHub Actions run", remedy)
    program = shutil.which("gh")
    if program is None:
        raise ReportError(f"--run={run}", "the gh command is not on the search path", _BY_HAND)
    with TemporaryDirectory(prefix="gpumem-accept-") as name:
        command = [program, "run", "download", match[4] if match else run, "--dir", name]
        command += ["--repo", "/".join(match.groups()[:3])] if match else []
        command += ["--pattern", artifact] if artifact else []
        try:
            process = subprocess.run(command, capture_output=True, check=False)
        except OSError as error:
            problem = f"gh cannot be run: {error.strerror}"
            raise ReportError(f"--run={run}", problem, _BY_HAND) from error
        if process.returncode:
            lines = process.stderr.decode(errors="replace").strip().splitlines()
            reason = lines[0] if lines else f"status {process.returncode}"
            raise ReportError(f"--run={run}", f"gh says: {reason}", _BY_HAND)
        folder = Path(name)
        paths = [path for path in sorted(folder.rglob("*.json")) if path.is_file()]
        reports = [path for path in paths if not path.is_symlink() and is_report(path)]
        if not reports:
            of = f"the artifacts {artifact}" if artifact else "its artifacts"
            problem = f"{of} have no JSON report of pytest-gpumem"
            raise ReportError(f"--run={run}", problem, "name the artifact with --artifact")
        yield folder, reports
