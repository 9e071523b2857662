"""Run the tests with each version, keeping the reports so that a search can be resumed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.bisect.candidates import release_of_the_day
from pytest_gpumem.cli.bisect.installation import (
    Environment,
    SetupError,
    UnreachedError,
    clean_environment,
)
from pytest_gpumem.errors import ReportError, SpecError
from pytest_gpumem.files.atomic_file import write_whole
from pytest_gpumem.report.json_report import read_report

if TYPE_CHECKING:
    from pytest_gpumem.report.json_report import SavedReport

FINISHED: Final = (0, 1)
"""exit statuses of pytest after which all tests ran"""


class SkippedError(Exception):
    """A version cannot be tried; the text is the reason."""


@dataclass(frozen=True)
class VersionTests:
    """The tests to run with each version, and the packages to install with it."""

    package: str
    """the package's name on the index"""
    tests: tuple[str, ...]
    """arguments of pytest: node ids, files, options"""
    requirements: tuple[str, ...]
    """requirements to install with the package, in pip's syntax"""
    device: str = "auto"
    light: bool = False
    as_of: tuple[str, ...] = ()
    """packages to install in the newest release that they had when the version was uploaded"""

    @property
    def slug(self) -> str:
        """A folder name for the reports, which changes if the tests are edited."""
        package = re.sub(r"\W+", "-", self.package).strip("-")
        settings = repr((self.package, self.tests, self.requirements, self.device))
        digest = hashlib.sha256(f"{settings}{self.as_of or ''}{'light' * self.light}".encode())
        for argument in self.tests:
            path = Path(argument.partition("::")[0])
            files = [path] if path.is_file() else []
            for folder, folders, names in os.walk(path):
                # Hidden folders and site-packages hold environments, including those of the search.
                folders[:] = sorted(
                    name for name in folders if name[0] != "." and name != "site-packages"
                )
                files += (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
            for file in files:
                digest.update(file.read_bytes())
        return f"{package}-{digest.hexdigest()[:8]}"


class Trials:
    """Runs the tests with one version after another, and stores each report in a file."""

    def __init__(self, question: VersionTests, folder: Path, *, timeout: float) -> None:
        self._question = question
        self.folder = folder / question.slug
        """folder with the reports and logs of these tests"""
        self._timeout = timeout

    def begin(self, *, fresh: bool) -> None:
        """Create the folder, which git ignores; if ``fresh``, delete earlier searches' files."""
        if fresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        ignore = self.folder.parent / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")

    def is_known(self, version: str) -> bool:
        """Return whether the folder has a result of this version."""
        return self._path(version, "json").exists() or self._path(version, "skipped").exists()

    def report(self, version: str) -> SavedReport:
        """Return a version's report, running its tests if there is none yet.

        Raises:
            SkippedError: the version cannot be installed, or its tests do not run.
            SpecError: no package index responds. This error is not stored, as it says nothing about
                the version.
        """
        path, skipped = self._path(version, "json"), self._path(version, "skipped")
        if skipped.exists():
            raise SkippedError(skipped.read_text(encoding="utf-8"))
        if path.exists():
            try:
                return read_report(path)
            except ReportError:  # truncated, or written by another version of this package
                path.unlink()
        try:
            self._measure(version, path)
            return read_report(path)
        except (SkippedError, ReportError) as error:
            path.unlink(missing_ok=True)
            write_whole(skipped, str(error).encode(), f"{skipped.name}.new")
            raise SkippedError(str(error)) from error

    def _measure(self, version: str, report: Path) -> None:
        environment = Environment(
            self.folder / f"environment-{_file_name(version)}",
            self._path(version, "install.log"),
            light=self._question.light,
        )
        package = self._question.package
        try:
            days = [
                f"{neighbour}=={release_of_the_day(package, version, neighbour)}"
                for neighbour in self._question.as_of
            ]
            environment.make([f"{package}=={version}", *days, *self._question.requirements])
            self._run_tests(environment, version, report)
        except SetupError as error:
            raise SkippedError(f"this version cannot be installed: {error}") from error
        except UnreachedError as error:
            problem = f"no package index answers: {error}"
            remedy = "connect to the network, and repeat the command: the search continues here"
            raise SpecError(f"{package} {version}", problem, remedy) from error
        else:
            if not any(result.measurement for result in read_report(report).results):
                reason = last_error(self._path(version, "pytest.log"), 0)
                raise SkippedError(f"no test was measured with this version: {reason}")
        finally:
            environment.remove()

    def _run_tests(self, environment: Environment, version: str, report: Path) -> None:
        no_baselines = self.folder / "no-baselines"
        command = [
            *(str(environment.python.with_name("pytest")), *self._question.tests),
            *("-p", "no:cacheprovider", f"--gpumem-device={self._question.device}"),
            *(f"--gpumem-json={report}", f"--gpumem-baseline-dir={no_baselines}"),
            "--gpumem-missing-baseline=note",
            *("--gpumem-stale=note", "--gpumem-attribution=on", "--gpumem-github=off"),
        ]
        log = self._path(version, "pytest.log")
        with log.open("w", encoding="utf-8") as output:
            try:
                status = subprocess.run(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=clean_environment(),
                    timeout=self._timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                raise SkippedError(f"its tests ran longer than {self._timeout:.0f} s") from None
            except OSError as error:
                raise SkippedError(f"pytest cannot be run: {error.strerror}") from error
        if status not in FINISHED or not report.exists():
            raise SkippedError(f"its tests do not run: {last_error(log, status)}")

    def _path(self, version: str, ending: str) -> Path:
        return self.folder / f"{_file_name(version)}.{ending}"


def last_error(log: Path, status: int) -> str:
    """Return the last line of pytest's output that names an error, and the log's name."""
    output = log.read_text(encoding="utf-8", errors="replace")
    lines = re.findall(r"^(?:E  +|ERROR:? )(.*\S)", output, re.MULTILINE)
    return f"{lines[-1] if lines else f'pytest ended with status {status}'} (see {log})"


def _file_name(version: str) -> str:
    return re.sub(r"[^\w.+-]", "_", version)[:40]
