"""Create an environment per version, with uv if it is installed, else with venv and pip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.light import OWN, normalized, own_requirements

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME: Final = re.compile(r"[A-Za-z0-9][-_.A-Za-z0-9]*")
UNSET: Final = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP")
"""variables that would make another environment's Python use modules or files of this one"""

LIGHT: Final = (sys.executable, "-m", "pytest_gpumem", "light", "--cudnn")
"""command that prints requirements without NVIDIA's packages, except cuDNN"""
UNREACHED: Final = re.compile(
    r"Retry\(total=0\b.* after (connection broken by .+)|Failed to fetch|error sending request|"
    r"network timeout|name resolution"
)
"""what uv and pip print if no index responds"""


class SetupError(Exception):
    """An environment could not be created; the text is the reason."""


class UnreachedError(Exception):
    """An environment could not be created because no package index responds; the text says why."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with pytest-gpumem and one version of the package in question."""

    folder: Path
    log: Path
    """collects the output of pip or uv"""
    light: bool = False
    """whether to leave NVIDIA's packages out, except cuDNN"""

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    def make(self, requirements: Sequence[str]) -> None:
        """Create the environment anew, with this package's requirements and the installed torch.

        ``requirements`` may name another torch. Raises SetupError if they cannot be installed
        together.
        """
        self.remove()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        uv = shutil.which("uv")
        if uv:
            self._run([uv, "venv", "--quiet", "--python", sys.executable, str(self.folder)])
            install = [uv, "pip", "install", "--quiet", "--python", str(self.python)]
        else:
            self._run([sys.executable, "-m", "venv", str(self.folder)])
            install = [str(self.python), "-m", "pip", "install", "--quiet"]
        packages = [*completed(requirements)]
        if self.light:
            pinned = self.folder / "light.txt"
            pinned.write_text(self._run([*LIGHT, *packages]), encoding="utf-8")
            packages = ["--no-deps", "-r", str(pinned)]
        self._run([*install, *packages])
        command = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(self._run([str(self.python), "-c", command]).strip())
        package = Path(__file__).parents[2]
        (site / package.name).symlink_to(package, target_is_directory=True)
        own = distribution(OWN)
        info = site / f"{package.name}-{own.version}.dist-info"
        info.mkdir()
        for name, content in (
            ("METADATA", own.read_text("METADATA") or own.read_text("PKG-INFO") or ""),
            ("entry_points.txt", own.read_text("entry_points.txt") or ""),
        ):
            (info / name).write_text(content, encoding="utf-8")

    def remove(self) -> None:
        """Delete the environment."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, command: Sequence[str]) -> str:
        with self.log.open("a", encoding="utf-8", errors="replace") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            process = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                env=clean_environment(),
                check=False,
            )
            log.write(process.stdout + process.stderr)
        if process.returncode:
            output = process.stderr or process.stdout
            reason = reason_of(output, process.returncode)
            unreached = UNREACHED.search(output)
            raise UnreachedError(unreached[1] or reason) if unreached else SetupError(reason)
        return process.stdout


def completed(requirements: Sequence[str]) -> list[str]:
    """Add this package's requirements, and the installed torch version unless one is named."""
    named = {normalized(match.group()) for match in map(NAME.match, requirements) if match}
    own = [line for line in own_requirements() if normalized(_package_name(line)) not in named]
    with suppress(PackageNotFoundError):
        release = installed_version("torch").partition("+")[0]
        own = [f"torch=={release}" if _package_name(line) == "torch" else line for line in own]
    return [*requirements, *own]


def _package_name(requirement: str) -> str:
    match = NAME.match(requirement)
    return match.group() if match else ""


def clean_environment() -> dict[str, str]:
    """Return this process's variables, except those that point to an environment."""
    return {name: value for name, value in os.environ.items() if name not in UNSET}


def reason_of(output: str, status: int) -> str:
    """Return the line of an installer's output that gives the reason for its failure.

    If uv lists causes below that line, the first cause is appended.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error)\b|[×]", line)]  # noqa: RUF001 - uv's
    causes = [line for line in lines if re.match(r"cause: |╰─▶ ", line)]
    messages = [*(errors or lines[-1:] or [f"exit status {status}"])[:1], *causes[:1]]
    return ": ".join(re.sub(r"^(ERROR|error|cause): |^[×╰─▶ ]+", "", line) for line in messages)  # noqa: RUF001 - uv's
