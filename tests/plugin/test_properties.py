"""A test's figures in the reports of others: JUnit's XML, pytest-json-report, pytest-html."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from helpers.sources import TWO_TESTS as TWO

EXPECTED = {
    "test_fits": {
        "gpumem_device": "virtual-T4",
        "gpumem_batch_size": 4,
        "gpumem_verdict": "no baseline",
        "gpumem_peak_allocated": 100 * 2**20,
        "gpumem_peak_reserved": 100 * 2**20,
    },
    "test_too_much[1]": {
        "gpumem_device": "virtual-T4",
        "gpumem_verdict": "over budget",
        "gpumem_peak_allocated": 300 * 2**20,
        "gpumem_peak_reserved": 300 * 2**20,
        "gpumem_verdict[part]": "no baseline",
        "gpumem_peak_allocated[part]": 300 * 2**20,
        "gpumem_peak_reserved[part]": 300 * 2**20,
    },
    "test_unmarked": {},
}


def junit(path):
    """Properties of each test in a JUnit file, names that are there twice refused."""
    found = {}
    for case in ET.parse(path).iter("testcase"):
        pairs = [(it.get("name"), it.get("value")) for it in case.iter("property")]
        assert len(pairs) == len(dict(pairs))
        found[case.get("name")] = dict(pairs)
    return found


def as_text(expected):
    return {name: {k: str(v) for k, v in it.items()} for name, it in expected.items()}


@pytest.mark.parametrize("apart", [False, True])
def test_junit_has_the_figures(suite, apart):
    arguments = ["--junitxml=junit.xml", "--gpumem-card=T4"]
    if apart:
        pytest.importorskip("xdist")
        session = suite.run_warm(*arguments, "-n", "2", source=TWO)
    else:
        session = suite.run(*arguments, source=TWO)
    assert "gpumem_peak" not in session.out
    assert junit(suite.path / "junit.xml") == as_text(EXPECTED)


def test_a_rerun_has_the_last_runs_figures_once(suite):
    pytest.importorskip("pytest_rerunfailures")
    source = """
        import itertools
        sizes = itertools.count(100, 100)

        @pytest.mark.gpu_memory
        def test_at_last():
            n = next(sizes)
            mib(n)
            assert n > 200

        @pytest.mark.gpu_memory(max_allocated_gib=0.15)
        def test_smaller_at_last(gpu_memory):
            mib(next(shrinking))

        shrinking = iter([200, 120])
    """
    options = ("--reruns=3", "--junitxml=junit.xml", "--gpumem-attribution=off")
    session = suite.run(*options, source=source)
    assert session.outcomes["passed"] == 2
    found = junit(suite.path / "junit.xml")
    assert found["test_at_last"]["gpumem_peak_allocated"] == str(300 * 2**20)
    assert found["test_smaller_at_last"]["gpumem_peak_allocated"] == str(120 * 2**20)
    assert found["test_smaller_at_last"]["gpumem_verdict"] == "no baseline"


def test_out_of_memory_in_junit(suite):
    source = """
        @pytest.mark.gpu_memory(max_gib=0.25)
        def test_too_large():
            mib(500)
    """
    suite.run("--junitxml=junit.xml", source=source)
    (found,) = junit(suite.path / "junit.xml").values()
    assert found["gpumem_verdict"] == "out of memory"
    assert found["gpumem_needed_allocated"] == str(500 * 2**20)


def test_the_properties_of_tests_stay(suite):
    source = """
        @pytest.mark.gpu_memory
        def test_it(record_property):
            record_property("mine", 1)
            mib(1)
    """
    suite.run("--junitxml=junit.xml", "-o", "junit_family=xunit1", source=source)
    (found,) = junit(suite.path / "junit.xml").values()
    assert found["mine"] == "1"
    assert found["gpumem_peak_allocated"] == str(2**20)


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_pytest_json_report_has_the_figures(suite, workers):
    pytest.importorskip("pytest_jsonreport")
    suite.run_warm(
        "--json-report", "--json-report-file=r.json", "--gpumem-card=T4", *workers, source=TWO
    )
    tests = json.loads((suite.path / "r.json").read_text())["tests"]
    found = {
        it["nodeid"].partition("::")[2]: {
            name: value for pair in it.get("user_properties", []) for name, value in pair.items()
        }
        for it in tests
    }
    assert found == EXPECTED


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_pytest_html_shows_the_figures(suite, workers):
    pytest.importorskip("pytest_html")
    suite.write("pytest.ini", "[pytest]\nfilterwarnings = error")
    source = TWO.replace('"part"', '"<b>part"')
    suite.run_warm("--html=r.html", "--gpumem-card=T4", *workers, source=source)
    data = html_data(suite.path / "r.html")
    (fits,), (too_much,), (unmarked,) = (
        [it["log"] for test, (it,) in data.items() if name in test]
        for name in ("test_fits", "test_too_much", "test_unmarked")
    )
    assert "GPU memory\ngpumem_device: virtual-T4\n" in fits
    assert "gpumem_peak_allocated: 104857600 (100.00 MiB)" in fits
    assert "gpumem_verdict: over budget" in too_much
    assert "gpumem_peak_allocated[&lt;b&gt;part]: 314572800 (300.00 MiB)" in too_much
    assert "gpumem" not in unmarked
    assert "GPU memory" not in unmarked


def html_data(path):
    """The tests in pytest-html's report: its page has them as JSON in an attribute."""

    class Finder(HTMLParser):
        found = None

        def handle_starttag(self, tag, attrs):
            if "data-jsonblob" in dict(attrs):
                self.found = json.loads(dict(attrs)["data-jsonblob"])

    finder = Finder()
    finder.feed(path.read_text(encoding="utf-8"))
    return finder.found["tests"]
