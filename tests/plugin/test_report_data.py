"""The data on pytest's reports: other plugins write a report's attributes as JSON."""

from __future__ import annotations

import json

CONFTEST = """
import json, pytest

@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    fields = {name: value for name, value in vars(report).items() if "gpumem" in name}
    with open("fields.jsonl", "a") as file:
        file.write(json.dumps([report.nodeid.partition("::")[2], report.when, fields]) + "\\n")
"""
SOURCE = """
@pytest.mark.gpu_memory(max_gib=1)
def test_marked():
    mib(10)

@pytest.mark.gpu_memory
def test_fails():
    raise ValueError

def test_plain():
    pass
"""


def test_a_report_has_one_attribute_of_plain_data_if_it_has_any(suite):
    suite.write("conftest.py", CONFTEST)
    suite.run("--gpumem-attribution=off", source=SOURCE)
    lines = (suite.path / "fields.jsonl").read_text().splitlines()
    fields = {(test, when): found for test, when, found in map(json.loads, lines)}
    some = {place: sorted(found["gpumem"]) for place, found in fields.items() if found}
    assert some == {("test_marked", "call"): ["results"], ("test_fails", "call"): ["marked"]}
