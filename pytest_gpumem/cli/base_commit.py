"""``gpumem compare --git``: tests compared with a commit that is measured now; no file is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from pytest_gpumem.baselines.git import GitError, path_in_repository, repository_root, run_git
from pytest_gpumem.cli.outcome import BAD_INPUT, Outcome
from pytest_gpumem.errors import SpecError
from pytest_gpumem.judge.verdict import BASE_COMMIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RAN: Final = (0, 1)
"""exit statuses of pytest in which tests ran: some of a base commit may fail"""
LAST_LINES: Final = 15


def compare_with_commit(revision: str, arguments: Sequence[str]) -> Outcome:
    """Measure a commit's tests in a worktree, then those of the working tree beside them.

    The second session prints what grew and its cause, and its exit status is the command's.

    Args:
        revision: as git names it: "origin/main".
        arguments: of both sessions of pytest.

    Raises:
        SpecError: there is no such commit.
    """
    with TemporaryDirectory(prefix="gpumem-compare-") as folder:
        own = ["-o", f"gpumem_baseline_dir={folder}/baselines", "--gpumem-missing-baseline=note"]
        command = [sys.executable, "-m", "pytest", *own, *arguments]
        with _worktree(revision, Path(folder, "base")) as (place, environment):
            sys.stderr.write(f"gpumem: measuring {revision} ...\n")
            base = subprocess.run(
                [*command, "--gpumem-update-baselines"],
                cwd=place,
                env=environment,
                capture_output=True,
                check=False,
            )
        if base.returncode not in RAN:
            lines = (base.stdout + base.stderr).decode(errors="replace").splitlines()
            problem = f"gpumem: pytest ended with status {base.returncode} in {revision}:"
            return Outcome("", BAD_INPUT, (problem, *lines[-LAST_LINES:]))
        if not Path(folder, "baselines").is_dir():
            sys.stderr.write(f"gpumem: no test was measured in {revision}\n")
        sys.stderr.write("gpumem: measuring the working tree ...\n")
        environment = {**os.environ, BASE_COMMIT: revision}
        return Outcome("", subprocess.run(command, env=environment, check=False).returncode)


@contextmanager
def _worktree(revision: str, folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Check a commit out; yield the working folder's place in it, and an environment for it.

    Packages that are imported from the repository are imported from the commit.
    """
    try:
        root = repository_root()
        place = folder / path_in_repository(Path(), root)
        run_git("worktree", "add", "--detach", str(folder), revision, "--")
    except GitError as error:
        remedy = "name a commit of this repository, such as origin/main (git fetch brings it)"
        raise SpecError(f"--git={revision}", str(error), remedy) from error
    try:
        inside = [Path(), root, *(Path(entry) for entry in sys.path if entry)]
        paths = [folder / entry for path in inside if (entry := _within(path, root)) is not None]
        old = os.environ.get("PYTHONPATH")
        entries = dict.fromkeys([*map(str, paths), *([old] if old else [])])
        yield place, {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
    finally:
        run_git("worktree", "remove", "--force", str(folder))


def _within(path: Path, root: Path) -> str | None:
    """Return a folder's path from the top of the repository; None of installed packages."""
    inside = os.path.relpath(os.path.realpath(path), os.path.realpath(root))
    installed = "site-packages" in inside or os.path.realpath(path).startswith(sys.prefix)
    return None if inside.startswith(os.pardir) or installed else inside
