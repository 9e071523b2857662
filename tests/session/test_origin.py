"""Where a session says that it ran: its shard, its commits, and whether it came to its end."""

from __future__ import annotations

import pytest
from helpers.git import commit, git

from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.report.model import Shard
from pytest_gpumem.session.origin import shard_of

GITLAB = {"CI_NODE_INDEX": "3", "CI_NODE_TOTAL": "8"}
PLAIN = {"num_shards": 1, "shard_id": 0}
"""the options of pytest-shard as they are without a command line"""


@pytest.mark.parametrize(
    ("options", "variables", "shard"),
    [
        ({"splits": 8, "group": 3}, {}, Shard(3, 8)),
        ({"num_shards": 8, "shard_id": 0}, {}, Shard(1, 8)),
        ({"splits": 4, "group": 1, **PLAIN}, GITLAB, Shard(1, 4)),
        (PLAIN, GITLAB, Shard(3, 8)),
        ({}, {**GITLAB, "CI_JOB_NAME": "gpu memory 3/8"}, Shard(3, 8)),
        ({}, {**GITLAB, "CI_JOB_NAME": "gpu-memory: [T4]"}, None),  # of parallel:matrix
        ({}, {"CI_NODE_TOTAL": "1", "CI_JOB_NAME": "gpu-memory"}, None),
        ({"splits": None, "group": None, **PLAIN}, {}, None),
        ({}, {"CI_NODE_INDEX": "9", "CI_NODE_TOTAL": "8"}, None),
        ({}, {"CI_NODE_INDEX": "one", "CI_NODE_TOTAL": "8"}, None),
        ({}, {"CI_NODE_INDEX": "1", "CI_NODE_TOTAL": str(2**62)}, None),
    ],
)
def test_a_shard_is_known_by_options_of_plugins_and_by_gitlabs_variables(
    monkeypatch, options, variables, shard
):
    for name in ("CI_NODE_INDEX", "CI_NODE_TOTAL", "CI_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert shard_of(options.get) == shard


def test_a_session_says_where_it_ran(suite, monkeypatch):
    """In GitLab's merged result, the request's own commit too."""
    git("init", "-q")
    suite.write("test_it.py", "@pytest.mark.gpu_memory\ndef test_a(): mib(3)\n")
    commit("one")
    own = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA", own)
    for name, value in GITLAB.items():
        monkeypatch.setenv(name, value)
    suite.run("--gpumem-json=r.json", "--gpumem-artifact=gpu")
    (origin,) = read_report("r.json").report.origins
    assert (origin.commit, origin.head) == (git("rev-parse", "HEAD").strip(), own)
    assert (origin.shard, origin.artifact) == (Shard(3, 8), "gpu")
    assert (origin.modified, origin.unfinished) == (False, "")


def test_an_interrupted_session_says_so_and_is_not_accepted(suite, gpumem):
    git("init", "-q")
    suite.write(
        "test_it.py",
        """
        @pytest.mark.gpu_memory
        def test_a(): mib(3)

        @pytest.mark.gpu_memory
        def test_b(): raise KeyboardInterrupt
        """,
    )
    commit("one")
    assert suite.run_warm("--gpumem-json=r.json").ret == 2
    assert len(read_report("r.json").results) == 1
    status, _, err = gpumem("accept", "r.json", "--yes")
    assert (status, suite.baselines()) == (2, {})
    assert "r.json: is from a run that did not finish: it was interrupted; run the tests" in err
