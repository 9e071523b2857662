"""The commits that pytest-xdist's workers on other machines have checked out.

A report says of which commit its figures are, and baselines are of the commit that is checked out
here: a worker in another checkout may have measured other code.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

ELSEWHERE: Final = "gpumem_elsewhere"
"""the key in a worker's input: the worker has a folder of its own"""
COMMIT: Final = "gpumem_commit"
"""the name of a worker's answer in its output"""


def ask(node: Any) -> None:  # noqa: ANN401 - of pytest-xdist
    """Ask a worker for its commit, where it does not run in the controller's folder."""
    spec = node.gateway.spec
    node.workerinput[ELSEWHERE] = bool(spec.chdir or not spec.popen)


def answer_commit(config: pytest.Config) -> None:
    """Send the commit of this worker's root folder, where it was asked for."""
    if config.workerinput.get(ELSEWHERE):  # type: ignore[attr-defined]
        config.workeroutput[COMMIT] = _head_commit(config)  # type: ignore[attr-defined]


def differing(config: pytest.Config, commits: Mapping[str, str]) -> dict[str, str]:
    """Return the workers, with their commits, that had another commit than the controller.

    The commit "" is that of a worker in no repository.
    """
    commits_known = {worker: commit for worker, commit in commits.items() if commit}
    here = _head_commit(config) if commits_known else ""
    return {worker: commit for worker, commit in commits_known.items() if here and commit != here}


def sentences(commits: Mapping[str, str]) -> list[str]:
    """Return sentences about workers that had another commit: no baseline is written from them."""
    return [
        f"worker {worker} tested commit {commit[:12]}, which is not checked out here: its figures "
        "are no baselines of this commit"
        for worker, commit in commits.items()
    ]


def _head_commit(config: pytest.Config) -> str:
    from pytest_gpumem.baselines.checkout import checkout_of

    checkout = checkout_of(Path(config.rootpath))
    return "" if checkout is None else checkout.commit
