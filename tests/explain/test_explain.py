"""Why it grew: what a failed test's report says of it, and what baselines keep."""

import json
import re

import pytest

MODEL = """
import os
GROWN = os.environ.get("TEST_EXPLAIN_GROWN") == "1"
WIDTH = 1024

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        if GROWN:
            x = x * 2 + x.exp()
        return torch.relu(x)

def train(steps=2, rows=8192):
    model = torch.nn.Sequential(*(Block() for _ in range(4))).cuda()
    adam = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.zeros(rows, WIDTH, device="cuda")).sum().backward()
        adam.step()
        adam.zero_grad()
"""
TEST = f"""{MODEL}
@pytest.mark.gpu_memory(batch_size=8192)
def test_train():
    train()
"""


@pytest.fixture
def recorded(suite):
    """A suite whose baseline was written, with its breakdown."""
    session = suite.run("--gpumem-update-baselines", source=TEST)
    assert session.outcomes == {"passed": 1}
    return suite


def entry(suite, test="test_train"):
    (content,) = map(json.loads, suite.baselines().values())
    return content["tests"][test]


def test_a_baseline_keeps_the_breakdown_and_its_largest_sites(recorded):
    (breakdown,) = entry(recorded)["breakdown"]
    assert sum(breakdown["categories"].values()) == entry(recorded)["peak_allocated"][0]
    assert len(breakdown["sites"]) <= 10
    sizes = [site["bytes"] for site in breakdown["sites"]]
    assert sizes == sorted(sizes, reverse=True)
    site = next(it for it in breakdown["sites"] if it["category"] == "activations")
    assert site["path"] == "test_it.py"
    assert site["function"] == "Block.forward"
    assert site["module"].startswith("Sequential.")
    assert str(recorded.path) not in str(breakdown)


def test_a_baseline_with_a_breakdown_is_read_and_holds(recorded):
    session = recorded.run()
    assert session.outcomes == {"passed": 1}
    assert session.verdicts() == {"test_train": "ok"}
    before = recorded.baselines()
    assert "1 unchanged" in recorded.run("--gpumem-update-baselines").flat
    assert recorded.baselines() == before


def test_a_baseline_without_one_gets_it_when_baselines_are_updated(suite):
    suite.run("--gpumem-update-baselines", "--gpumem-attribution=off", source=TEST)
    assert "breakdown" not in entry(suite)
    suite.run("--gpumem-update-baselines")
    assert "breakdown" in entry(suite)


def test_a_regression_leads_with_its_cause_and_shows_what_grew(recorded, monkeypatch):
    monkeypatch.setenv("TEST_EXPLAIN_GROWN", "1")
    session = recorded.run()
    assert session.outcomes == {"failed": 1}
    written = (recorded.path / "test_it.py").read_text().splitlines()
    line = next(i for i, it in enumerate(written, 1) if "x.exp()" in it)
    assert "; peak allocated grew by " in session.flat
    assert f"at test_it.py:{line} (Block.forward); peak" in session.flat
    assert f" activations test_it.py:{line} in Block.forward: " in session.flat
    assert re.search(r"FAILED test_it.py::test_train - [+][0-9.]+ MiB .* activations", session.flat)
    assert "at the peak" not in session.out
    session = recorded.run("-v")
    assert "regressed: activations +" in session.flat
    assert f"at test_it.py:{line} (Block.forward); peak" in session.flat
    assert f" activations test_it.py:{line} in Block.forward: " in session.flat
    assert f"test_it.py:{line} (Block.forward) 0 B" in session.flat
    assert "activations, 3 blocks, Sequential.*" in session.flat
    titles = [it for it in session.out.splitlines() if it.startswith("at the peak")]
    assert titles[0].split() == ["at", "the", "peak", "baseline", "now", "difference"]


def test_only_the_failing_test_runs_again(recorded, monkeypatch):
    monkeypatch.setenv("TEST_EXPLAIN_GROWN", "1")
    recorded.write("test_it.py", TEST.replace("    train()\n", "    print('ran')\n    train()\n"))
    for option, runs in (("auto", 1), ("off", 1), ("on", 1)):
        session = recorded.run("-s", "-v", f"--gpumem-attribution={option}")
        assert session.out.count("ran\n") == runs, option  # the second is quiet
        assert ("at the peak" in session.out) == (option != "off")


def test_the_option_is_read_from_the_ini_file_too(recorded, monkeypatch):
    monkeypatch.setenv("TEST_EXPLAIN_GROWN", "1")
    recorded.write("pytest.ini", "[pytest]\ngpumem_attribution = off")
    session = recorded.run("-v")
    assert session.outcomes == {"failed": 1}
    assert "at the peak" not in session.out
    session = recorded.run("--gpumem-attribution=sometimes")
    assert "write --gpumem-attribution=auto or --gpumem-attribution=on" in session.err


def test_over_budget_shows_what_takes_the_memory(suite):
    session = suite.run(
        "-v", source=TEST.replace("batch_size=8192", "batch_size=8192, max_allocated_gib=0.1")
    )
    assert session.outcomes == {"failed": 1}
    assert "at the peak now" in session.flat
    assert "allocated by now of" in session.flat
    assert "(Block.forward)" in session.flat


def test_out_of_memory_shows_what_the_step_needs(suite):
    source = TEST.replace("batch_size=8192", "batch_size=8192, max_gib=0.2")
    assert " activations test_it.py:" in suite.run(source=source).flat
    session = suite.run("-v")
    assert session.outcomes == {"failed": 1}
    assert "out of memory" in session.flat
    assert "at the peak now" in session.flat
    assert "optimizer state 32.03 MiB" in session.flat


def test_parts_have_their_own(suite, monkeypatch):
    source = f"""{MODEL}
@pytest.mark.gpu_memory
def test_it(gpu_memory):
    model = torch.nn.Sequential(*(Block() for _ in range(4))).cuda()
    with gpu_memory.measure("forward"):
        loss = model(torch.zeros(8192, WIDTH, device="cuda")).sum()
    with gpu_memory.measure("backward"):
        loss.backward()
"""
    suite.run("--gpumem-update-baselines", source=source)
    parts = entry(suite, "test_it")["parts"]
    forward, backward = (parts[it]["breakdown"][0]["categories"] for it in ("forward", "backward"))
    assert "gradients" not in forward
    assert backward["gradients"] > 0
    monkeypatch.setenv("TEST_EXPLAIN_GROWN", "1")
    session = suite.run("-v")
    assert session.out.index("part forward") < session.out.index("part backward")
    assert session.out.count("at the peak") == 3


def test_a_long_list_is_cut_unless_asked_for(suite):
    lines = "\n".join(f"    kept.append(mib({n}))" for n in range(1, 16))
    source = (
        f"@pytest.mark.gpu_memory(max_allocated_gib=0.05)\ndef test_it():\n    kept = []\n{lines}"
    )
    source = source.replace("mib(", "torch.zeros(2**18, device='cuda').repeat(")
    assert "more with -vv" not in suite.run(source=source).out
    session = suite.run("-v")
    assert "(5 more with -vv)" in session.out
    session = suite.run("-vv")
    assert "more with -vv" not in session.out
    assert "test_it.py:20 (test_it)" in session.out


def test_the_lines_of_a_failure_are_those_of_the_run_that_failed(suite):
    source = """
runs = []

@pytest.mark.gpu_memory(max_allocated_gib=0.05)
def test_it():
    runs.append(1)
    assert len(runs) == 1
    kept = mib(100)
"""
    session = suite.run("-v", source=source)
    assert session.outcomes == {"failed": 1}
    assert "over budget: peak allocated of 100.00 MiB" in session.flat
    assert "at the peak now" in session.flat
    assert "100.00 MiB other, 1 block" in session.flat


def test_warm_up_is_taken_again_before_the_second_run(suite):
    source = f"""{MODEL}
kept = {{}}

@pytest.mark.gpu_memory(max_allocated_gib=0.05, warmup=1)
def test_it():
    if "model" not in kept:
        kept["model"] = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
        kept["adam"] = torch.optim.Adam(kept["model"].parameters())
    kept["model"](torch.zeros(8192, WIDTH, device="cuda")).sum().backward()
    kept["adam"].step()
"""
    session = suite.run("-v", source=source)
    assert "optimizer state 8.01 MiB" in session.flat
    assert "second run" not in session.flat


def test_workers_explain_as_well(recorded, monkeypatch):
    monkeypatch.setenv("TEST_EXPLAIN_GROWN", "1")
    session = recorded.run_warm("-n", "1")
    assert "; peak allocated grew by " in session.flat
    assert re.search(r"[+][0-9.]+ MiB activations test_it.py:\d+ in Block.forward", session.flat)


def test_a_broken_breakdown_is_named(recorded):
    ((name, content),) = recorded.baselines().items()
    for old, new, words in (
        ('"activations":', '"activation":', "Invalid enum value"),
        ('"cached":', '"cache":', "cache"),
        ('"line":', '"row":', "row"),
    ):
        (recorded.path / "baselines" / name).write_text(content.replace(old, new, 1))
        session = recorded.run()
        assert session.outcomes == {"failed": 1}
        assert "cannot read the baseline" in session.flat
        assert words in session.flat
        assert "breakdown" in session.flat
