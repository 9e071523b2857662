"""A test that passes runs once, also where a report is written that may be accepted later."""

import pytest
from helpers.judged import LENIENT, NOTHING, PLAIN, measured

from pytest_gpumem.explain.explanations import ExplainPolicy
from pytest_gpumem.judge.judge import judge
from pytest_gpumem.judge.result import Result
from pytest_gpumem.judge.verdict import Verdict

POLICY = ExplainPolicy("auto", None, timelines=False, updating=False, reporting=True)


@pytest.mark.parametrize(
    ("failed", "recorded", "explained"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, True)],
)
def test_only_a_failure_runs_again_for_the_breakdown_of_a_report(failed, recorded, explained):
    measurement = measured((1 << 20, 1 << 21))
    verdict = judge(measurement, PLAIN, NOTHING, LENIENT)
    verdict = Verdict(verdict.kind, failed=failed, headline=verdict.headline)
    results = [Result("test_it.py::test_it", verdict, measurement)]
    assert POLICY.explains_now(results, recorded=recorded) is explained
