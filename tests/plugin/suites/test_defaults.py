"""Arguments of the marker for a folder: from the ini file's patterns, and from conftest files."""

from __future__ import annotations

import pytest

from pytest_gpumem.errors import SpecError
from pytest_gpumem.plugin.suites.defaults import read_rules


def test_a_line_is_a_pattern_and_arguments():
    lines = ['tests/*: tolerance="2%", max_gib=8', 'a.py::TestX::*: card="T4"']
    assert read_rules(lines) == [
        ("tests/*", {"tolerance": "2%", "max_gib": 8}),
        ("a.py::TestX::*", {"card": "T4"}),
    ]


@pytest.mark.parametrize(
    "line", ["tests/*", "tests/*:", ": max_gib=8", "a: 8", "a: **x", "a: max_gib=x", "a: max_gib="]
)
def test_any_other_line_is_refused_with_an_example(line):
    with pytest.raises(SpecError, match=r"write a pattern and arguments: tests/models/\*: tol"):
        read_rules([line])


def test_the_nearest_place_wins_argument_by_argument(suite):
    marked = "@pytest.mark.gpu_memory\ndef test_it(gpu_memory): mib(10)\n"
    suite.write("test_top.py", marked)
    suite.write("models/test_a.py", "import pytest, torch\n" + marked.replace("mib(10)", "pass"))
    source = """
    import pytest, torch

    @pytest.mark.gpu_memory(batch_size=2)
    def test_b(gpu_memory):
        assert (gpu_memory.card, gpu_memory.batch_size) == ("L4", 2)
        torch.empty(10 << 20, device="cuda")
    """
    suite.write("models/test_b.py", source)
    suite.write("models/conftest.py", "def pytest_gpumem_defaults(item): return {'card': 'L4'}")
    suite.write(
        "pytest.ini",
        "[pytest]\ngpumem_defaults =\n    *: max_allocated_gib=0.001, batch_size=4\n"
        '    models/*: max_allocated_gib=1, card="T4"',
    )
    session = suite.run("-v")
    assert session.outcomes == {"passed": 1, "failed": 2}
    assert "over budget: peak allocated of 10.00 MiB" in session.flat  # test_top, of "*"
    assert "allocated no memory on L4" in session.flat  # test_a: a limit, and the conftest's card
    suite.write("pytest.ini", "[pytest]\ngpumem_defaults = models: max_gb=1")
    session = suite.run("models/test_b.py")
    assert session.outcomes == {"passed": 1}  # the pattern is another one
    suite.write("pytest.ini", "[pytest]\ngpumem_defaults = models/*: max_gb=1")
    assert "there is no argument named max_gb" in suite.run("models/test_b.py").flat
