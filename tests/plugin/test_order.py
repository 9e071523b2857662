"""The same figures whatever ran before (docs/architecture.md, rule 7)."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
from helpers.sources import program

from pytest_gpumem.plugin.pytest_item import PytestItem
from pytest_gpumem.report.json_report import read_report

STEP = """
def step():
    model = torch.nn.Linear(1000, 1000, device="cuda")
    x = torch.zeros(64, 1000, device="cuda")
    model(x).sum().backward()
    kept = [mib(n) for n in (3, 30, 0.3)]

@pytest.mark.gpu_memory(max_gib=1)
def test_step():
    step()
"""
WHOLE = [
    "test_step",
    "test_leaves_holes",
    "test_fails_with_tensors_in_its_frames",
    "test_fails_unmarked",
    "test_chained",
    "test_on_another_card",
    "test_on_two",
    "test_first_with_cublas",
]
BEFORE = (
    STEP
    + """
leaked = []

@pytest.mark.gpu_memory
def test_leaves_holes():
    blocks = [mib(n) for n in (1.5, 7, 3, 2, 15, 0.2, 0.01, 5, 90)]
    leaked.extend(blocks[::3])

@pytest.mark.gpu_memory
def test_fails_with_tensors_in_its_frames():
    kept = mib(100)
    raise ValueError

def test_fails_unmarked():
    kept = leaked[:]
    raise ValueError  # under pytester, an assertion's values live on in its record of hooks

@pytest.mark.gpu_memory
def test_chained():
    def inner():
        kept = mib(50)
        raise ValueError
    try:
        inner()
    except ValueError as error:
        kept = mib(60)
        raise KeyError from error

@pytest.mark.gpu_memory(card="T4")
def test_on_another_card():
    step()

@pytest.mark.gpu_memory(devices=2)
def test_on_two():
    torch.zeros(1000, 1000, device="cuda:1") @ torch.zeros(1000, 1000, device="cuda:1")
    leaked.append(mib(33, "cuda:1"))

@pytest.mark.gpu_memory
def test_first_with_cublas():
    torch.zeros(1000, 1000, device="cuda") @ torch.zeros(1000, 1000, device="cuda")

@pytest.mark.gpu_memory(max_gib=1)
def test_step_after():
    step()
"""
)


def test_a_step_has_the_same_figures_alone_and_after_all_sorts_of_others(suite):
    alone = suite.run("-k", "test_step_after", source=BEFORE).figures()["test_step_after"]
    session = suite.run("-v")
    assert session.outcomes == {"passed": 6, "failed": 3}
    figures = session.figures()
    assert figures["test_step"] == figures["test_step_after"] == alone
    assert alone[0] > 40
    for others in (WHOLE[1:4], WHOLE[4:], reversed(WHOLE)):
        order = [f"test_it.py::{name}" for name in (*others, "test_step_after")]
        assert suite.run("-v", *order).figures()["test_step_after"] == alone


def test_every_test_alone_has_the_figures_that_it_has_in_the_whole_run(suite):
    whole = suite.run("-v", source=BEFORE).figures()
    for name in ("test_leaves_holes", "test_on_two", "test_first_with_cublas"):
        assert suite.run("-v", f"test_it.py::{name}").figures() == {name: whole[name]}


def test_figures_are_the_same_in_workers(suite):
    pytest.importorskip("xdist")
    here = suite.run("-v", source=BEFORE).figures()
    there = suite.run_warm("-v", "-n", "2").figures()
    assert there == here


def test_memory_that_is_held_at_the_start_is_said_with_its_holder(suite):
    session = suite.run(
        source="""
        leaked = []

        @pytest.fixture(scope="module")
        def wide():
            return mib(70)

        @pytest.mark.gpu_memory
        def test_leaks():
            leaked.append(mib(24))

        @pytest.mark.gpu_memory
        def test_uses(wide): pass

        @pytest.mark.gpu_memory
        def test_after():
            mib(40)

        @pytest.mark.gpu_memory
        def test_fails():
            kept = mib(80)
            assert False

        @pytest.mark.gpu_memory
        def test_after_the_failure():
            leaked.clear()
        """
    )
    assert session.figures()["test_after"] == (40, 40)
    assert (
        "note: 94.00 MiB that fixture 'wide', test_it.py::test_leaks left behind are not "
        "counted (2 tests)"
    ) in session.flat
    assert "80.00 MiB" not in session.flat
    assert "test_fails left behind" not in session.flat


CYCLES = """
import random

class Cycle:
    def __init__(self, size):
        self.itself = self
        self.block = torch.empty(size, dtype=torch.uint8, device="cuda")

@pytest.mark.gpu_memory
@pytest.mark.parametrize("seed", [1, 4, 8, 10])
def test_cycles(seed):
    rng = random.Random(seed)
    width = rng.choice([64, 128, 256])
    layers = [torch.nn.Linear(width, width) for _ in range(rng.randint(1, 6))]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = rng.choice([torch.optim.SGD, torch.optim.AdamW])(model.parameters(), lr=0.1)
    size, objects = rng.randint(1, 8) * 2**20, rng.randint(0, 60)
    for step in range(rng.randint(10, 60)):
        model(torch.randn(32, width, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        Cycle(size)
        kept = [[] for _ in range(objects)]
"""


def test_garbage_in_cycles_is_collected_at_the_same_steps_in_another_order(suite):
    first = suite.run(source=CYCLES).figures()
    names = [f"test_it.py::test_cycles[{seed}]" for seed in (10, 8, 4, 1)]
    assert suite.run(*names).figures() == first


FIXTURES = program("wide_fixtures.py")


def test_a_wide_fixture_counts_for_each_test_that_uses_it_whichever_ran_first(suite):
    whole = suite.run("-v", source=FIXTURES).figures()
    assert whole["TestIt::test_weights"] == (250, 250)
    assert whole["TestIt::test_none"] == (30, 30)
    assert whole["TestIt::test_dynamic"] == (350, 350)
    assert whole["TestClass::test_first"] == whole["TestClass::test_second"]
    for name, figures in whole.items():
        assert suite.run("-v", f"test_it.py::{name}").figures() == {name: figures}
    back = [f"test_it.py::{name}" for name in reversed(whole)]
    assert suite.run("-v", *back).figures() == whole


SET_UP_PEAKS = program("set_up_peaks.py")


def test_set_up_peaks_of_wide_fixtures_are_those_of_the_test_alone_in_every_order(suite):
    suite.write("test_it.py", SET_UP_PEAKS)
    names = re.findall(r"def (test_\w+)", SET_UP_PEAKS)
    alone = {}
    for name in names:
        alone |= suite.run("-v", f"test_it.py::{name}").figures()
    assert {name: allocated for name, (allocated, _) in alone.items()} == {
        "test_both": 360,  # data's 60 under model's 300
        "test_the_other_way": 300,
        "test_asks": 350,
        "test_asks_in_a_part": 300,
        "test_asks_in_a_part (part)": 300,
        "test_asks_in_a_part (end)": 45,
        "test_trainer": 330,
        "test_trainer_with_its_model": 300,
        "test_trainer_first": 330,
    }
    for seed in range(6):
        order = random.Random(seed).sample(names, len(names))
        assert suite.run("-v", *(f"test_it.py::{name}" for name in order)).figures() == alone, order
    assert suite.run("-v", *(f"test_it.py::{name}" for name in reversed(names))).figures() == alone


ASKED_BEFORE = """
@pytest.fixture(scope="module")
def data(): return mib(20)

@pytest.fixture(scope="module")
def trainer(request): return mib(3), request.getfixturevalue("data")

@pytest.mark.gpu_memory
def test_data_first(data, trainer): mib(1)

@pytest.mark.gpu_memory
def test_trainer(trainer): mib(1)
"""


def test_a_set_up_that_asks_for_a_fixture_that_its_test_has_already_counts_it_for_the_next(suite):
    """pytest does not execute the asked-for fixture again: its uses have to be seen elsewhere."""
    both = suite.run_warm("-v", source=ASKED_BEFORE).figures()
    assert {name: allocated for name, (allocated, _) in both.items()} == {
        "test_data_first": 24,
        "test_trainer": 24,
    }
    assert suite.run_warm("-v", "-k", "test_trainer").figures()["test_trainer"][0] == 24


GAPS = """
leaked = []

@pytest.mark.gpu_memory
def test_leaves_a_gap():
    leaked.extend(map(mib, (20, 200, 20)))
    del leaked[1]

@pytest.mark.gpu_memory(max_gib=0.5)
def test_after():
    first = mib(180)
    del first
    second = mib(240)

@pytest.mark.gpu_memory
def test_with_a_part(gpu_memory):
    with gpu_memory.measure("part"):
        first = mib(180)
        del first
        second = mib(240)

@pytest.mark.gpu_memory
def test_with_a_graph():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = mib(30).zero_()
    first = mib(180)
    del first
    second = mib(240)
"""


def test_gaps_in_expandable_segments_change_no_figure(suite, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    session = suite.run_warm("-v", source=GAPS)
    assert session.outcomes == {"passed": 4}
    figures = session.figures()
    assert figures["test_after"] == figures["test_with_a_part"] == (240, 240)
    assert "divides PyTorch's expandable segments" not in session.flat
    names = "test_after", "test_with_a_part", "test_with_a_part (part)", "test_with_a_graph"
    alone = suite.run_warm("-v", "-k", "not gap").figures()
    assert {name: figures[name] for name in names} == {name: alone[name] for name in names}


GRAPH_LEFT = """
leaked = []

@pytest.fixture(scope="module")
def wide(): return mib(3)

@pytest.mark.gpu_memory
def test_leaves_a_graph():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = mib(30).zero_()
    leaked.append((graph, kept))

@pytest.mark.gpu_memory
def test_after(wide): mib(5)
"""


def test_a_graphs_own_memory_of_an_earlier_test_stays_uncounted_as_the_device_settles(suite):
    """In the pool of the graph, where no pin keeps blocks in place."""
    assert suite.run_warm("-v", source=GRAPH_LEFT).figures()["test_after"] == (8, 40)
    assert suite.run_warm("-v", "-k", "after").figures() == {"test_after": (8, 40)}


RING = """
class Ring:
    def __init__(self):
        self.data, self.ring = mib(30), self

@pytest.fixture(scope="module")
def ring():
    return Ring()

@pytest.mark.gpu_memory
def test_first(ring): mib(1)

@pytest.mark.gpu_memory
def test_second(ring): mib(1)
"""


def test_a_wide_fixture_that_ends_as_garbage_is_gone_when_the_next_test_begins(suite):
    suite.write("test_a.py", RING)
    suite.write("test_b.py", STEP)
    session = suite.run_warm("-v")
    assert session.outcomes == {"passed": 3}
    assert "left behind" not in session.flat


def test_an_unmarked_test_may_set_up_what_a_marked_one_asks_for_late(suite):
    """By a name in its code, also of a fixture that asks for another one."""
    session = suite.run(
        "-v",
        source="""
        @pytest.fixture(scope="module")
        def weights(): return mib(30)

        @pytest.fixture(scope="module")
        def model(weights): return mib(20)

        @pytest.fixture(scope="module")
        def asks(request): return request.getfixturevalue("model")

        def test_unmarked(weights): pass

        @pytest.mark.gpu_memory
        def test_it(request): request.getfixturevalue("asks")
        """,
    )
    assert session.figures() == {"test_it": (50, 50)}, session.out


def test_a_fixture_that_failed_without_a_gpu_is_set_up_anew_for_a_marked_test(suite):
    """pytest keeps a fixture's error, and its skip, for all tests of its scope."""
    session = suite.run(
        "-v",
        source="""
        @pytest.fixture(scope="session")
        def fails(): return mib(30)

        @pytest.fixture(scope="session")
        def skips():
            if not torch.cuda.is_available(): pytest.skip("no GPU")
            return mib(20)

        def test_unmarked(request): request.getfixturevalue(str("fails"))
        def test_skipped(request): request.getfixturevalue(str("skips"))
        def test_again(request): request.getfixturevalue(str("fails"))

        NAMES = ["fails", "skips"]

        @pytest.mark.gpu_memory
        def test_it(request):
            kept = [request.getfixturevalue(name) for name in NAMES]
        """,
    )
    assert session.figures() == {"test_it": (50, 50)}, session.out
    assert "2 failed, 1 passed, 1 skipped" in session.out


def test_a_wide_fixture_has_segments_of_its_own_in_every_order(suite):
    """In one program all of this would share one segment of 20 MiB."""
    source = """
        @pytest.fixture(scope="module")
        def data(): return mib(2)

        @pytest.fixture(scope="module")
        def model(): return mib(6)

        @pytest.mark.gpu_memory
        def test_first(data, model): mib(2)

        @pytest.mark.gpu_memory
        def test_again(model, data): mib(2)
    """
    session = suite.run(source=source)
    assert session.figures() == {"test_first": (10, 60), "test_again": (10, 60)}
    assert suite.run("-k", "again").figures() == {"test_again": (10, 60)}


WIDE_OVER_A_LIMIT = """
@pytest.fixture(scope="module")
def weights():
    return torch.nn.Linear(4096, 4096, bias=False, device="cuda")  # 64 MiB

@pytest.mark.gpu_memory
def test_has_room(weights): pass

@pytest.mark.gpu_memory(max_gib=0.05)
def test_uses_it(weights): pass

@pytest.mark.gpu_memory(max_gib=0.05)
def test_takes_more(weights): weights(torch.ones(4096, device="cuda"))

@pytest.mark.gpu_memory(max_gib=1)
def test_part(request, gpu_memory):
    with gpu_memory.measure("part", max_gib=0.05):
        request.getfixturevalue("weights")
        mib(2)
"""


def test_a_test_whose_wide_fixture_takes_more_than_its_limit_ends_alike_in_every_order(suite):
    suite.write("test_it.py", WIDE_OVER_A_LIMIT)

    def endings(*names):
        ran = suite.run("--gpumem-json=r.json", *names)
        results = read_report(suite.path / "r.json").results
        ends = {
            it.nodeid.partition("::")[2]: (
                it.verdict.kind,
                it.verdict.headline,
                it.measurement.peaks,
            )
            for it in results
            if it.verdict.kind != "no baseline"
        }
        return ends, ran.out.count("parameters  test_it.py:8 in weights")

    whole, lines = endings()
    assert lines == 3  # of a fixture that an earlier test set up, too
    assert {name: kind for name, (kind, *_) in whole.items()} == {
        "test_uses_it": "over budget",
        "test_takes_more": "out of memory",
        "test_part": "out of memory",
    }
    for name in whole:
        alone, _ = endings(f"test_it.py::{name}")
        assert alone == {name: whole[name]}


ON_CARDS = """
@pytest.fixture(scope="session")
def large(): return mib(20_000)

@pytest.fixture(scope="module")
def weights(large): return mib(2)

@pytest.fixture(scope="module")
def model():
    print("set up on", torch.cuda.get_device_name(), torch.cuda.device_count())
    model = torch.nn.Linear(1000, 1000, device="cuda")
    model(torch.ones(8, 1000, device="cuda")).sum().backward()  # with cuBLAS' workspace
    yield model
    raise ValueError("at its end")

@pytest.fixture(scope="module")
def asks(request): return request.getfixturevalue("model")

@pytest.mark.gpu_memory
def test_hopper(model): mib(1)

@pytest.mark.gpu_memory(card="T4")
def test_turing(asks): mib(1)

@pytest.mark.gpu_memory(devices=2)
def test_two(model): mib(1)

@pytest.mark.gpu_memory
def test_large(weights): pass

@pytest.mark.gpu_memory(card="T4")
def test_too_large(weights): pass
"""


def test_a_wide_fixture_is_set_up_anew_for_a_test_on_another_card(suite):
    """Another card has other workspaces and another size; so the verdicts are those alone, too."""
    suite.write("test_it.py", ON_CARDS)

    def results(*names):
        session = suite.run("-v", "-s", *names)
        return session.figures(), session.verdicts(), session.out

    names = re.findall(r"def (test_\w+)", ON_CARDS)
    alone = {name: results(f"test_it.py::{name}")[:2] for name in names}
    workspaces = [alone[name][0][name][0] for name in ("test_hopper", "test_turing")]
    assert workspaces[0] - workspaces[1] > 20
    assert alone["test_too_large"][1] == {"test_too_large": "out of memory"}
    for order in (names, names[::-1], sorted(names)):
        figures, verdicts, out = results(*(f"test_it.py::{name}" for name in order))
        for name in names:
            own = [{name: shown[name]} for shown in (figures, verdicts)]
            assert own == list(alone[name]), (name, order)
        assert len(re.findall("set up on (NVIDIA|Tesla)", out)) == 3


def test_a_wide_fixture_of_another_card_that_a_computed_name_asks_for_is_not_counted(suite):
    session = suite.run(
        "-v",
        source="""
        @pytest.fixture(scope="module")
        def model(): return mib(30)

        @pytest.mark.gpu_memory
        def test_first(model): mib(1)

        @pytest.mark.gpu_memory(card="T4")
        def test_computed(request):
            request.getfixturevalue("mod" + "el"[:])
            mib(1)
        """,
    )
    assert session.figures() == {"test_first": (31, 32), "test_computed": (1, 2)}
    assert "30.00 MiB that fixture 'model' left behind are not counted" in session.flat


def test_the_memory_of_a_wide_fixture_has_its_lines_and_categories_in_every_order(suite):
    suite.write(
        "test_it.py",
        """
        @pytest.fixture(scope="module")
        def model():
            linear, norm = torch.nn.Linear(2048, 2048), torch.nn.BatchNorm1d(2048)
            return torch.nn.Sequential(linear, norm).cuda()

        @pytest.fixture(scope="session")
        def data():
            return mib(16)

        @pytest.fixture(scope="module")
        def reused():
            torch.nn.Linear(1024, 1024, bias=False, device="cuda")
            return mib(4), mib(3)  # the first lies where the parameter was

        @pytest.mark.gpu_memory
        def test_model(model, data): pass

        @pytest.mark.gpu_memory
        def test_reused(reused): pass

        @pytest.mark.gpu_memory
        def test_other(data): pass

        @pytest.mark.gpu_memory
        def test_parts(request, gpu_memory):
            with gpu_memory.measure("first"):
                request.getfixturevalue("model")
            with gpu_memory.measure("second"):
                request.getfixturevalue("data")
        """,
    )

    def breakdowns(*names):
        suite.run("--gpumem-json=r.json", *names)
        found = {}
        for it in read_report(suite.path / "r.json").results:
            (attribution,) = it.measurement.attributions
            shown = attribution.breakdown
            found[it.nodeid, it.part] = shown.categories, shown.sites, set(shown.lines)
        return found

    names = ("test_model", "test_reused", "test_other", "test_parts")
    alone = {}
    for name in names:
        alone |= breakdowns(f"test_it.py::{name}")
    categories, sites, lines = alone["test_it.py::test_model", ""]
    assert list(categories) == ["parameters", "buffers", "other"]
    assert {site.line for site in sites} == {4, 9}
    assert len(lines) == 2
    assert list(alone["test_it.py::test_reused", ""][0]) == ["other"]
    whole = [f"test_it.py::{name}" for name in names]
    assert breakdowns(*whole) == alone
    assert breakdowns(*reversed(whole)) == alone


def test_a_parametrized_wide_fixture_counts_with_its_own_parameter_only(suite):
    session = suite.run(
        "-v",
        source="""
        @pytest.fixture(scope="module", params=[300, 20])
        def wide(request):
            return mib(request.param)

        @pytest.mark.gpu_memory(max_gib=0.4)
        def test_it(wide): mib(10)

        @pytest.mark.gpu_memory(max_gib=0.4)
        def test_again(wide): mib(10)
        """,
    )
    assert session.figures() == {
        "test_it[300]": (310, 310),
        "test_again[300]": (310, 310),
        "test_it[20]": (30, 30),
        "test_again[20]": (30, 30),
    }


def test_an_overriding_fixture_does_not_count_as_the_one_that_it_overrides(suite):
    suite.write(
        "conftest.py",
        """
import pytest, torch

@pytest.fixture(scope="session")
def model():
    return torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
""",
    )
    marked = "@pytest.mark.gpu_memory\ndef test_it(model): mib(10)\n"
    suite.write("test_a.py", marked)
    suite.write(
        "test_b.py", f"@pytest.fixture(scope='module')\ndef model(): return mib(5)\n{marked}"
    )
    suite.write(
        "test_c.py",
        f"@pytest.fixture(scope='module')\ndef model(model): return model, mib(5)\n{marked}",
    )
    assert [allocated for allocated, _ in suite.run("-v").figures().values()] == [110, 15, 115]


ADAM = """
def train(steps):
    model = torch.nn.Linear(1000, 1000, device="cuda")
    adam = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        adam.zero_grad()
        model(torch.zeros(20000, 1000, device="cuda")).sum().backward()
        adam.step()

@pytest.mark.gpu_memory
def test_one_step(): train(1)

@pytest.mark.gpu_memory
def test_two_steps(): train(2)

kept = {}

@pytest.mark.gpu_memory(warmup=1)
def test_warmup():
    model = kept.setdefault("model", torch.nn.Linear(1000, 1000, device="cuda"))
    adam = kept.setdefault("adam", torch.optim.Adam(model.parameters()))
    model(torch.zeros(8, 1000, device="cuda")).sum().backward()
    adam.step()

@pytest.mark.gpu_memory
def test_sgd():
    model = torch.nn.Linear(1000, 1000, device="cuda")
    sgd = torch.optim.SGD(model.parameters())
    model(torch.zeros(8, 1000, device="cuda")).sum().backward()
    sgd.step()
"""


def test_one_step_with_a_fresh_optimizer_is_said(suite):
    session = suite.run("-v", source=ADAM)
    assert session.outcomes == {"passed": 4}
    assert (
        "only one step ran with a new Adam, and its state of 7.64 MiB was allocated last"
        in session.flat
    )
    assert "write warmup=1 (1 test)" in session.flat
    figures = session.figures()
    assert figures["test_two_steps"] > figures["test_one_step"]


def test_what_a_test_does_to_torchs_own_statistics_and_cap(suite):
    session = suite.run(
        "-v",
        source="""
        @pytest.mark.gpu_memory
        def test_resets():
            mib(200)
            torch.cuda.reset_peak_memory_stats()
            mib(50)

        @pytest.mark.gpu_memory
        def test_resets_and_reads(gpu_memory):
            before = torch.cuda.memory_allocated()
            kept = mib(20)
            mib(200)
            torch.cuda.reset_peak_memory_stats()
            mib(50)
            assert gpu_memory.peak_allocated == 220 << 20
            assert torch.cuda.max_memory_allocated() - before == 70 << 20

        @pytest.mark.gpu_memory(max_gib=1)
        def test_lifts_the_cap():
            torch.cuda.set_per_process_memory_fraction(1.0)
            mib(1500)

        @pytest.mark.gpu_memory(max_gib=1)
        def test_after():
            mib(1500)
        """,
    )
    assert session.figures()["test_resets"] == (200, 200)
    assert session.figures()["test_resets_and_reads"] == (220, 220)
    assert session.verdicts()["test_lifts_the_cap"] == "out of memory"
    assert session.verdicts()["test_after"] == "out of memory"
    assert torch_is_itself_again()


def torch_is_itself_again():
    import torch

    return torch.cuda.reset_peak_memory_stats.__module__ == "torch.cuda.memory"


RECORD = """
def pytest_gpumem_judged(item, result):
    if result.measurement.out_of_memory:
        (item.config.rootpath / "short").write_text(repr(result.measurement.out_of_memory))
"""


def test_an_out_of_memory_error_tells_the_tests_own_memory_in_any_order(suite):
    """Rooms that earlier tests left and that are filled, and memory of theirs that is freed."""
    source = """
        leaked = []

        @pytest.mark.gpu_memory
        def test_leaks():
            blocks = [mib(n) for n in (1.5, 7, 40, 0.3)]
            leaked.extend(blocks[::2])

        @pytest.mark.gpu_memory(max_gib=1)
        def test_short():
            leaked.clear()
            kept = mib(30)
            mib(2000)
    """
    suite.write("conftest.py", RECORD)
    suite.run("-k", "test_short", source=source)
    alone = (suite.path / "short").read_text()
    suite.run()
    assert (suite.path / "short").read_text() == alone
    assert f"allocated={30 << 20}" in alone


def test_late_fixtures_of_a_function_that_wraps_itself_are_none():
    """Its loop of wrappers has no end: no reason for the collection to fail."""

    def function(): ...

    function.__wrapped__ = function
    session = SimpleNamespace(_fixturemanager=None)
    item = SimpleNamespace(fixturenames=[], function=function, session=session)
    assert list(PytestItem(item).late_fixtures()) == []
