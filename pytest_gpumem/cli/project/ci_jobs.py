"""Jobs of CI that run the tests on the virtual GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pytest_gpumem.baselines.git import GitError, run_git
from pytest_gpumem.cli.project.settings_file import NewFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RUN: Final = "pytest --gpumem-device=virtual --gpumem-missing-baseline=fail"
GITHUB: Final = """\
# Tests of GPU memory, on the virtual GPU: no runner with a GPU is needed.
name: GPU memory
on: [push, pull_request]
permissions:
  contents: read
jobs:
  gpu-memory:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v6
        with:
          fetch-depth: 0  # reports name the line that changed since the baseline's commit
      - uses: actions/setup-python@v6
        with:
          python-version: "3.12"
          cache: pip
          cache-dependency-path: {cache}
      - run: pip install {packages}
      - run: {run} --gpumem-html=gpumem.html
      - uses: actions/upload-artifact@v6
        if: always()
        with:
          name: gpu-memory
          path: gpumem.html
"""
GITLAB: Final = """\
# Tests of GPU memory, on the virtual GPU: no runner with a GPU is needed.
gpu-memory:
  image: python:3.12
  variables:
    GIT_DEPTH: "0"  # reports name the line that changed since the baseline's commit
  script:
    - pip install {packages}
    - {run} --junitxml=junit.xml --gpumem-html=gpumem.html
  artifacts:
    when: always
    expose_as: GPU memory
    paths:
      - gpumem.html
    reports:
      junit: junit.xml
"""
GITLAB_JOB: Final = ".gitlab/gpu-memory.yml"
INCLUDE: Final = f"include:\n  - local: {GITLAB_JOB}\n"


def ci_of(root: Path) -> str:
    """Return whose job a project needs: "github" or "gitlab"."""
    if (root / ".github").is_dir():
        return "github"
    if (root / ".gitlab-ci.yml").exists() or (root / ".gitlab").is_dir():
        return "gitlab"
    try:
        remotes = run_git("-C", str(root), "remote", "-v")
    except GitError:
        return "github"
    return "gitlab" if b"gitlab" in remotes else "github"


def _packages(root: Path, torch: str) -> tuple[str, str]:
    """Return pip's requirements, and the file by which a cache of them is named.

    A baseline belongs to one version of torch: so torch is pinned.
    """
    pinned = [f"torch=={torch}"] if torch else ["torch"]
    extra = ["'pytest-gpumem[html]'"]
    if (root / "requirements.txt").is_file():
        return " ".join(["-r requirements.txt", *pinned, *extra]), "requirements.txt"
    if (root / "pyproject.toml").is_file() and "[project]" in (root / "pyproject.toml").read_text(
        "utf-8", "replace"
    ):
        return " ".join(["-e .", *pinned, *extra]), "pyproject.toml"
    return " ".join([*pinned, *extra]), "pyproject.toml"


def github(root: Path, torch: str) -> list[NewFile]:
    """Return the workflow for GitHub Actions."""
    packages, cache = _packages(root, torch)
    job = GITHUB.format(packages=packages, cache=cache, run=RUN)
    return [NewFile(root / ".github" / "workflows" / "gpu-memory.yml", job)]


def gitlab(root: Path, torch: str) -> list[NewFile]:
    """Return the job for GitLab, in a file of its own, and the pipeline that includes it."""
    packages, _ = _packages(root, torch)
    job = NewFile(root / GITLAB_JOB, GITLAB.format(packages=packages, run=RUN))
    pipeline = root / ".gitlab-ci.yml"
    if not pipeline.exists():
        return [job, NewFile(pipeline, INCLUDE)]
    if GITLAB_JOB in pipeline.read_text("utf-8", "replace"):
        return [job]
    return [job, NewFile(pipeline, None, f"add to its include: - local: {GITLAB_JOB}")]


CI_JOBS: Final[dict[str, Callable[[Path, str], list[NewFile]]]] = {
    "github": github,
    "gitlab": gitlab,
}
"""the files of each, for a project's folder and a version of torch"""
