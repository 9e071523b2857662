"""Parts that are held to other parts: both breakdowns stand side by side where that fails."""

from __future__ import annotations

import json

SOURCE = """
@pytest.mark.gpu_memory(baseline=False)
def test_it(gpu_memory):
    with gpu_memory.measure("eager") as eager:
        small = mib(100)
    del small
    assert eager.part == "eager"
    with gpu_memory.measure("graph", RELATION):
        same = mib(100)
        extra = mib(20)
"""


def test_a_part_that_takes_more_fails_with_both_breakdowns(suite):
    suite.write("test_it.py", SOURCE.replace("RELATION", "at_most=1.10, of=eager"))
    session = suite.run("--gpumem-json=a.json", "--gpumem-markdown=a.md", "--gpumem-html=a.html")
    assert session.outcomes == {"failed": 1}
    limit = "at_most='1.1 * eager' (110.00 MiB)"
    headline = f"over budget: peak allocated of 120.00 MiB is 10.00 MiB over {limit}"
    assert f"part graph: {headline}" in session.flat
    assert "+20.00 MiB other test_it.py:4 in mib: return torch.empty(" in session.flat
    assert "next: find the lines that differ from eager's" in session.flat
    (whole, eager, graph) = json.loads((suite.path / "a.json").read_text())["results"]
    assert [whole["verdict"]["failed"], eager["verdict"]["failed"]] == [False, False]
    assert graph["verdict"]["kind"] == "over budget"
    assert "10.00 MiB over" in (suite.path / "a.md").read_text()
    full = suite.run("-v")
    lines = [" ".join(line.split()) for line in full.out.splitlines()]
    assert "at the peak eager graph difference" in lines
    (index,) = [i for i, line in enumerate(lines) if line.startswith("at the peak eager")]
    assert lines[index + 2] == "other 100.00 MiB 120.00 MiB +20.00 MiB"


def test_what_keeps_the_relation_passes_and_equal_is_not_less(suite):
    for relation in ('at_most="eager + 20MiB"', "at_most=1.2, of=eager", 'less_than="2 * eager"'):
        session = suite.run("-v", source=SOURCE.replace("RELATION", relation))
        assert session.outcomes == {"passed": 1}
        assert session.table["test_it (graph)"]["budget"]
    session = suite.run(source=SOURCE.replace("RELATION", 'less_than="eager + 20MiB"'))
    assert session.outcomes == {"failed": 1}
    words = "peak allocated of 120.00 MiB is as much as less_than='eager + 20.00 MiB' (120.00 MiB)"
    assert words in session.flat
    same = SOURCE.replace("RELATION", "at_most=0.9, of=eager").replace(
        "        extra = mib(20)\n", ""
    )
    session = suite.run(source=same)
    assert "next: find why it saves nothing: eager has the same peak" in session.flat


def test_a_relation_to_a_part_that_was_not_measured_is_an_error(suite):
    session = suite.run(source=SOURCE.replace("RELATION", 'at_most="compiled"'))
    assert session.outcomes == {"failed": 1}
    assert "this names no part that was measured before (measured: 'eager')" in session.flat
