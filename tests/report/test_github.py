"""GitHub's annotations: a line for each failure, whatever its name holds."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.sample_report import EVIL, attribution, entry, measured, result, sample

from pytest_gpumem.judge.verdict import Kind, Lookup, Verdict
from pytest_gpumem.measurement import Holder, Keeper, Site, Stayed
from pytest_gpumem.report.github import cause_warnings, error_lines
from pytest_gpumem.sizes import MIB

COMMAND = re.compile(r"::(?:error|warning) (?P<properties>[^:]*)::(?P<message>.*)")
ROOT = Path("/work/project")


def lines(results, root=ROOT, workspace=ROOT):
    return list(error_lines(results, root=root, workspace=workspace))


def decoded(line):
    """What GitHub's runner makes of a line: properties first, then the message."""
    found = COMMAND.fullmatch(line)
    pairs = dict(it.split("=", 1) for it in found["properties"].split(","))
    codes = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ",", "%25": "%"}

    def plain(text):
        return re.sub("|".join(codes), lambda it: codes[it[0]], text)

    return {name: plain(text) for name, text in pairs.items()}, plain(found["message"])


def failed(name="test_it", headline="regressed: by 1 MiB", **values):
    one = result(name, measured(attribution(layers=1)), Lookup(entry(attribution(layers=1))))
    return replace(one, verdict=Verdict(Kind.REGRESSED, failed=True, headline=headline), **values)


def test_each_failure_has_a_line_the_most_urgent_first():
    wanted = [it for it in sample().results if it.verdict.failed and not it.expected]
    found = lines(sample().results)
    assert len(found) == len(wanted) > 2
    messages = [decoded(it)[1] for it in found]
    assert messages[0].startswith("out of memory")
    assert all(message.endswith(("(virtual-T4)", "(virtual-H100)")) for message in messages)


def test_a_line_is_what_github_documents():
    (line,) = lines([failed()])
    assert line == (
        "::error file=tests/training/test_models.py,line=28,"
        "title=GPU memory%3A tests/training/test_models.py%3A%3Atest_it"
        "::regressed: by 1 MiB (virtual-T4)"
    )


@pytest.mark.parametrize("odd", ["a,b", "a:b::c", "100%", "%0A", "a\nb", "a\r\nb", "a=b"])
def test_what_github_reads_otherwise_is_encoded(odd):
    (line,) = lines([failed(odd, headline=odd, location=(f"{odd}.py", 3))])
    assert "\n" not in line
    assert "\r" not in line
    properties, message = decoded(line)
    assert properties == {
        "file": f"{odd}.py",
        "line": "3",
        "title": f"GPU memory: tests/training/test_models.py::{odd}",
    }
    assert message == f"{odd} (virtual-T4)"


def test_control_characters_are_shown_and_not_sent():
    (line,) = lines([failed(EVIL, headline=EVIL)])
    assert line.isprintable()


def test_files_are_named_from_the_repository_on(tmp_path):
    (tmp_path / "linked").symlink_to(tmp_path / "repo")
    (tmp_path / "repo/inner/tests").mkdir(parents=True)
    one = failed(location=("tests/test_a.py", 7))

    def file(root, workspace):
        (line,) = lines([one], root, workspace)
        return decoded(line)[0]["file"]

    repo = tmp_path / "repo"
    assert file(repo / "inner", repo) == "inner/tests/test_a.py"
    assert file(tmp_path / "linked/inner", repo) == "inner/tests/test_a.py"
    assert file(repo / "inner", tmp_path / "other") == f"{repo}/inner/tests/test_a.py"


def test_without_a_place_there_is_none():
    (line,) = lines([failed(location=None)])
    assert line.startswith("::error title=")


# The lines of causes


@pytest.fixture
def project(tmp_path):
    """A repository with pytest's root in a folder of it, where the samples' model lies."""
    root = tmp_path / "inner"
    (root / "src").mkdir(parents=True)
    (root / "src/model.py").touch()
    return root


def warnings(results, project):
    found = cause_warnings(results, root=project, workspace=project.parent)
    return [decoded(line) for line in found]


def grown(name, **values):
    """A test that regressed by src/model.py:88."""
    before = Lookup(entry(attribution(layers=4)))
    return replace(result(name, measured(attribution(layers=6)), before), **values)


def test_failures_of_one_line_are_one_annotation_there(project):
    names = [f"test_{number}" for number in range(12)]
    ((properties, message),) = warnings([grown(name) for name in names], project)
    assert properties == {
        "file": "inner/src/model.py",
        "line": "88",
        "title": "GPU memory: 12 failures by this line",
    }
    place = re.escape("src/model.py:88 (Attention.forward)")
    lead = rf"activations \+\d+\.\d\d MiB at {place}"
    assert re.match(rf"{lead} of tests/\S+::test_0; ", message)
    assert message.endswith("test_9 and 2 more failed")


def test_an_out_of_memory_and_a_leak_are_annotated_where_they_asked_for_memory(project):
    oom = next(it for it in sample().results if it.verdict.kind is Kind.OUT_OF_MEMORY)
    short = replace(oom.measurement.out_of_memory, path="src/model.py", line=31)
    oom = replace(oom, measurement=replace(oom.measurement, out_of_memory=short))
    site = Site("src/model.py", 7, "f", "CACHE.append(x)", "", "activations", 3 * MIB, 3)
    stayed = Stayed(0, 3 * MIB, (site,), (Holder("global variable CACHE", 3 * MIB, 3),))
    leak = result("test_leak", replace(measured(attribution(layers=1)), stayed=stayed))
    leak = replace(leak, verdict=Verdict(Kind.LEAKED, failed=True, headline="leaked"))
    found = {properties["line"]: message for properties, message in warnings([oom, leak], project)}
    request = f"out of memory: a request of 512.00 MiB; {oom.name} failed"
    held = f"leaked: 3.00 MiB of activations, held by global variable CACHE; {leak.name} failed"
    assert (found["31"], found["7"]) == (request, held)


def over(kind):
    """A test whose peak is too high for a limit, with what keeps its activations."""
    failed = next(it for it in sample().results if it.verdict.kind is kind)
    (first,) = failed.measurement.attributions
    site = next(it for it in first.breakdown.sites if it.category == "activations")
    text = "local variable best of step, src/train.py:11"
    keeper = Keeper(site.path, site.line, site.category, text, site.nbytes, 3, (1, 2))
    sites = (site, *(it for it in first.breakdown.sites if it.category == "gradients"))
    first = replace(first, breakdown=replace(first.breakdown, sites=sites), keepers=(keeper,))
    return replace(failed, measurement=replace(failed.measurement, attributions=(first,)))


def test_what_keeps_the_largest_lines_is_annotated_where_a_limit_was_met(project):
    """An out of memory is annotated where it asked for more."""
    oom, over_budget = over(Kind.OUT_OF_MEMORY), over(Kind.OVER_BUDGET)
    short = replace(oom.measurement.out_of_memory, path="src/model.py", line=31)
    oom = replace(oom, measurement=replace(oom.measurement, out_of_memory=short))
    kept = (
        r"\d+\.\d\d MiB of activations of src/model.py:88 \(Attention.forward\) kept by local "
        r"variable best of step, src/train.py:11, of steps 1 and 2"
    )
    found = {it["line"]: message for it, message in warnings([oom, over_budget], project)}
    assert re.match(rf"out of memory: a request of 512.00 MiB; {kept}; ", found["31"])
    assert re.match(rf"over budget: {kept}; ", found["88"])
    attributions = over_budget.measurement.attributions
    alone = tuple(replace(it, keepers=()) for it in attributions)
    measurement = replace(over_budget.measurement, attributions=alone)
    assert warnings([replace(over_budget, measurement=measurement)], project) == []


def test_no_line_is_annotated_that_github_could_not_show(project):
    (project / "src/model.py").unlink()
    assert warnings([grown("test_x")], project) == []
    assert warnings([grown("test_x", expected=True)], project) == []
    outside = cause_warnings([grown("test_x")], root=project, workspace=project / "other")
    assert list(outside) == []
