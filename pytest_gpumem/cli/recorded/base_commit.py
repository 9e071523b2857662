"""``gpumem compare --git``: measure another commit now, and compare with it; no file is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from pytest_gpumem.cli.outcome import BAD_INPUT, Outcome
from pytest_gpumem.errors import SpecError
from pytest_gpumem.files.git import GitError, path_in_repository, repository_root, run_git
from pytest_gpumem.judge.verdict import BASE_COMMIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LAUNCHER: Final = """
import os, pytest, sys
root, status = sys.argv[1] + os.sep, pytest.main(sys.argv[2:])
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
environments = tuple(map(os.path.realpath, (sys.prefix, sys.base_prefix)))
environments = tuple(folder for folder in environments if folder.startswith(root))
files = [file for file in map(os.path.realpath, files) if file.startswith(root)]
strays = [file for file in files if not file.startswith(environments)]
print(*sorted(strays), sep="\\n", file=sys.stderr)
sys.exit(90 if strays else status)
"""
"""runs pytest in the worktree, checking for modules imported from the working tree"""
STRAYS: Final = 90
"""exit status of LAUNCHER if the tests imported modules of the working tree"""
RAN: Final = (0, 1)
"""exit statuses of pytest that mean that the tests ran: those of the base commit may fail"""
LAST_LINES: Final = 15


def compare_with_commit(revision: str, arguments: Sequence[str]) -> Outcome:
    """Measure a commit's tests in a worktree, then the working tree's, and compare the two.

    The second session prints the growth and its cause, and gives the exit status.
    """
    with TemporaryDirectory(prefix="gpumem-compare-") as folder:
        own = ["-o", f"gpumem_baseline_dir={folder}/baselines", "--gpumem-missing-baseline=note"]
        options = [*own, *arguments]
        with _worktree(revision, Path(folder, "base")) as (root, place, environment):
            sys.stderr.write(f"gpumem: measuring {revision} ...\n")
            base = subprocess.run(
                [sys.executable, "-c", LAUNCHER, root, *options, "--gpumem-update-baselines"],
                cwd=place,
                env=environment,
                capture_output=True,
                check=False,
            )
        if base.returncode not in RAN:
            lines = (base.stdout + base.stderr).decode(errors="replace").splitlines()
            problem = f"gpumem: pytest ended with status {base.returncode} in {revision}:"
            if base.returncode == STRAYS:
                problem = f"gpumem: tests of {revision} imported these files of the working tree:"
            return Outcome("", BAD_INPUT, (problem, *lines[-LAST_LINES:]))
        if not Path(folder, "baselines").is_dir():
            sys.stderr.write(f"gpumem: no test was measured in {revision}\n")
        sys.stderr.write("gpumem: measuring the working tree ...\n")
        command = [sys.executable, "-m", "pytest", *options]
        environment = {**os.environ, BASE_COMMIT: revision}
        return Outcome("", subprocess.run(command, env=environment, check=False).returncode)


@contextmanager
def _worktree(revision: str, folder: Path) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """Check a commit out into a worktree at ``folder``, and remove the worktree after the block.

    Yields:
        the repository's top folder, the folder of the worktree that corresponds to the working
        folder, and an environment that imports the repository's packages from the worktree.
    """
    try:
        root = repository_root()
        place = folder / path_in_repository(Path(), root)
        run_git("worktree", "add", "--detach", str(folder), revision, "--")
    except GitError as error:
        remedy = "name a commit of this repository, such as origin/main (git fetch brings it)"
        raise SpecError(f"--git={revision}", str(error), remedy) from error
    try:
        top = os.path.realpath(root)
        entries = map(os.path.realpath, [*sys.path, os.curdir, str(root), str(root / "src")])
        within = (os.path.relpath(entry, top) for entry in entries)
        paths = [str(folder / entry) for entry in within if not entry.startswith(os.pardir)]
        # The worktree has tracked files only: skip folders such as a virtual environment's.
        paths = [path for path in paths if Path(path).is_dir()]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        yield top, place, {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    finally:
        run_git("worktree", "remove", "--force", str(folder))
