"""Who keeps the blocks of a peak that grew: a small regression of each kind, all in one session."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import threading

import pytest
from helpers.planted_holders import EDITS, PEAK, RIGHT, SHAPES, naming, planted_program
from helpers.random_growth import edited_program, wrong_cause
from packaging.version import Version

from pytest_gpumem.explain.keeper_finder import KeeperFinder, PinWatch

HEAD = """\
import pytest, torch

PLANTED = False
LOG, CACHE = [], {}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 16384)
        self.last = None

    def forward(self, x):
        return self.linear(x).exp().sin()


@pytest.fixture
def model():
    LOG.clear(), CACHE.clear()
    return Model().cuda()


def batch():
    return torch.zeros(64, 64, device="cuda")


class Trainer:
    history = None


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), foreach=False)
"""

BODIES = {
    "local_variable": (
        """
        optimizer = optimizer_of(model)
        for step in range(3):
            out = model(batch())
            out.sum().backward()
            optimizer.step()
            if PLANTED and step == 0:
                best = out.detach()
        """,
        r"kept by local variable best of test_local_variable, test_it.py:(\d+), of step 1",
        "best = out.detach()",
    ),
    "list": (
        """
        optimizer = optimizer_of(model)
        for _ in range(3):
            out = model(batch())
            out.sum().backward()
            optimizer.step()
            if PLANTED:
                LOG.append(out.detach())
        """,
        r"kept by global variable LOG of test_it.py \(list of 2\), of step",
        "",
    ),
    "graph": (
        """
        for _ in range(3):
            loss = model(batch()).sum()
            loss.backward()
            if PLANTED:
                CACHE.setdefault("losses", []).append(model(batch()).sum())
        """,
        r"kept by the graph of global variable CACHE of test_it.py \(dict of 1, list of \d\)",
        "",
    ),
    "retained": (
        """
        for _ in range(3):
            loss = model(batch()).sum()
            loss.backward(retain_graph=PLANTED)
            torch.empty(100, 1 << 20, device="cuda")  # the peak, whatever cuBLAS' workspaces are
        """,
        (
            r"kept by the graph of local variable loss of test_retained, test_it.py:\d+, "
            r"which backward\(retain_graph=True\) did not free \(test_it.py:(\d+)\)"
        ),
        "loss.backward(retain_graph=PLANTED)",
    ),
    "gradients": (
        """
        optimizer = optimizer_of(model)
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not PLANTED)
        """,
        (
            r"kept by .grad of the parameters, "
            r"since zero_grad\(set_to_none=False\) at test_it.py:(\d+), of step 1"
        ),
        "set_to_none=not PLANTED",
    ),
    "closure": (
        """
        for _ in range(3):
            big = model(batch()).detach()
            if PLANTED:
                LOG.append(lambda big=big: big)
        """,
        (
            r"kept by global variable LOG of test_it.py \(list of \d, default argument of "
            r"test_closure.<locals>.<lambda>"
        ),
        "",
    ),
    "attribute": (
        """
        trainer = Trainer()
        for _ in range(3):
            out = model(batch()).detach()
            if PLANTED:
                trainer.history = out
            del out
            model(batch())
        """,
        (
            r"kept by local variable trainer of test_attribute, test_it.py:\d+ "
            r"\(attribute history of Trainer\)"
        ),
        "",
    ),
    "exception": (
        """
        def checked(value):
            seen = value.detach() + 1
            raise ValueError(seen.shape)
        for _ in range(3):
            out = model(batch())
            try:
                checked(out)
            except ValueError as error:
                if PLANTED:
                    LOG.append(error)
        """,
        (
            r"kept by global variable LOG of test_it.py \(list of \d, ValueError, "
            r"local variable seen of checked, test_it.py:(\d+)\)"
        ),
        "seen = value.detach() + 1",
    ),
}


def source(planted):
    tests = [
        f"@pytest.mark.gpu_memory\ndef test_{name}(model):{body}"
        for name, (body, *_) in BODIES.items()
    ]
    return f"{HEAD}\n\n".replace("PLANTED = False", f"PLANTED = {planted}") + "\n\n".join(tests)


def test_what_keeps_the_blocks_is_named_and_no_figure_changes(suite, monkeypatch):
    assert suite.run("--gpumem-update-baselines", source=source(planted=False)).ret == 0
    lines = suite.write("test_it.py", source(planted=True)).read_text().splitlines()
    session = suite.run()
    assert session.outcomes == {"failed": len(BODIES)}
    sections = re.split(r"^_+ test_(\w+) _+$", session.out, flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    for name, (_, words, code) in BODIES.items():
        match = re.search(words, " ".join(texts[name].split()))
        assert match, f"{words}\n{texts[name]}"
        if code:
            assert code in lines[int(match[1]) - 1], name
    # Without the search each test has the same figures, and the tests after it as well.
    monkeypatch.setattr(KeeperFinder, "search", lambda *_: None)
    unsearched = suite.run()
    assert "kept by" not in unsearched.out
    assert unsearched.figures() == session.figures()


OVER_LIMITS = """\
import pytest, torch

LOG = []


@pytest.fixture(autouse=True)
def cleared():
    yield
    LOG.clear()


def work(number):
    model = torch.nn.Linear(64, 16384).cuda()
    for _ in range(number):
        out = model(torch.zeros(64, 64, device="cuda"))
        LOG.append(out.detach() + 1)
        del out


@pytest.mark.gpu_memory(max_gib=40/1024)
def test_refused():
    work(12)


@pytest.mark.gpu_memory(max_allocated_gib=30/1024)
def test_over():
    work(8)


@pytest.mark.gpu_memory
def test_part(gpu_memory):
    with gpu_memory.measure("train", max_allocated_gib=30/1024):
        work(8)
"""


def test_who_keeps_the_blocks_is_told_where_a_limit_was_met(suite, monkeypatch):
    options = ("--gpumem-html=a.html", "--gpumem-markdown=a.md", "-v")
    session = suite.run(*options, source=OVER_LIMITS)
    assert session.verdicts()["test_refused"] == "out of memory"
    for name in ("over", "part"):
        words = "kept by global variable LOG of test_it.py (list of 7)"
        (text,) = re.findall(
            rf"^_+ test_{name} _+$(.*?)^(?:_+ test|=)", session.out, re.MULTILINE | re.DOTALL
        )
        flat = " ".join(text.split())
        assert re.search(rf"test_it.py:21 .*?\) {re.escape('28.00 MiB ' + words)}", flat)
        for report in ("a.html", "a.md"):
            told = (suite.path / report).read_text().replace("\\", "")  # Markdown escapes
            assert words in " ".join(told.split())
    brief = suite.run()
    assert brief.out.count("kept by global variable LOG of test_it.py") == 2
    monkeypatch.setattr(KeeperFinder, "search", lambda *_: None)
    unsearched = suite.run()
    assert "kept by" not in unsearched.out
    assert unsearched.figures() == session.figures() == brief.figures()


WIDE = """\
import os
import pytest, torch

STEPS = 6 if os.environ.get("NEW") else 1


@pytest.fixture(scope="module")
def config():
    return {}


@pytest.fixture(scope="session")
def table():
    return torch.zeros(2**22, device="cuda")


def steps(layer):
    logits, labels = [], []
    for step in range(STEPS):
        logits.append(torch.empty(2**22, device="cuda"))
        labels.append(torch.zeros(2**20 * (1 + step % 2), device="cuda"))
        yield
    layer(torch.ones(1, 8, device="cuda"))


@pytest.mark.gpu_memory
def test_before(config):
    for _ in steps(torch.nn.Linear(8, 8, device="cuda")):
        pass


@pytest.mark.gpu_memory
def test_midst(request):
    for _ in steps(torch.nn.Linear(8, 8, device="cuda")):
        request.getfixturevalue("table")
"""


def test_a_wider_fixture_that_the_test_sets_up_changes_no_keeper(suite, monkeypatch):
    """It is set up in the first run alone: only there are its snapshots, and its memory."""
    suite.run("--gpumem-update-baselines", source=WIDE)
    monkeypatch.setenv("NEW", "1")
    for order in (("test_before", "test_midst"), ("test_midst",)):
        session = suite.run(*(f"test_it.py::{name}" for name in order))
        sections = re.split(r"^_+ (test_\w+) _+$", session.out, flags=re.MULTILINE)
        for text in sections[2::2]:
            told = " ".join(text.split())
            assert re.search(r"logits\.append.*?kept by local variable logits of steps", told)
            assert re.search(r"labels\.append.*?kept by local variable labels of steps", told)
            assert "variable layer" not in told
        assert len(sections[2::2]) == len(order)


def test_random_programs_have_the_line_and_the_keeper_that_were_planted(suite, monkeypatch):
    """As python -m benchmarks.reports.named_causes, which runs more of them."""
    programs = {f"test_{seed}.py": edited_program(seed) for seed in range(200, 243, 4)}
    for name, program in programs.items():
        (suite.path / name).write_text(program.source, encoding="utf-8")
    suite.run_warm("--gpumem-update-baselines")  # some programs keep memory for good
    monkeypatch.setenv("NEW", "1")
    suite.run_warm("--gpumem-json=r.json")
    results = json.loads((suite.path / "r.json").read_text())["results"]
    mistakes = [
        wrong_cause(programs.pop(result["nodeid"].partition("::")[0]), result) for result in results
    ]
    assert not programs
    wrong = [mistake for mistake in mistakes if mistake and not mistake.startswith("no keeper")]
    assert not wrong
    assert mistakes.count("") >= len(mistakes) - 1, mistakes


def test_what_was_planted_in_shapes_that_were_named_wrong_once_is_named_first(suite, monkeypatch):
    """As python -m benchmarks.reports.planted_holders, which runs more of them.

    A seed of each shape (accelerate#84, NeMo-RL, higher#6, nanoGPT#158 and others), garbage that is
    no failure, and a few more of a checkpoint that stays beside the model that loaded it. Edits
    are in test_edits.py.
    """
    shapes = [*SHAPES]
    checkpoint = shapes.index("a checkpoint beside the model that loaded it")
    garbage = shapes.index("garbage in cycles")
    every = len(SHAPES) + len(EDITS)
    seeds = [*range(len(SHAPES)), garbage + every]
    seeds += range(checkpoint + every, checkpoint + 6 * every, every)
    programs = {f"test_{seed}.py": planted_program(seed) for seed in seeds}
    for name, program in programs.items():
        (suite.path / name).write_text(program.source, encoding="utf-8")
    peaks = [name for name, program in programs.items() if program.found_as == PEAK]
    suite.run_warm("--gpumem-update-baselines", *peaks)
    monkeypatch.setenv("NEW", "1")
    suite.run_warm("--gpumem-json=r.json")
    results = json.loads((suite.path / "r.json").read_text())["results"]
    found = {result["nodeid"].partition("::")[0]: result for result in results}
    named = {name: naming(program, found[name]) for name, program in programs.items()}
    assert {name: how for name, how in named.items() if how[0] != RIGHT} == {}


LEAVES = """
import os
import pytest, torch


@pytest.mark.gpu_memory
def test_leaves():
    net = torch.nn.Linear(8, 8).cuda()
    leaves = [torch.zeros(1 << 20, device="cuda", requires_grad=True) for _ in range(4)]
    for leaf in leaves:
        (leaf * 2).sum().backward()
        net(torch.ones(1, 8, device="cuda"))
        if "NEW" not in os.environ:
            leaf.grad = None
"""


def test_gradients_of_leaves_that_are_no_parameters_are_those_of_their_holder(suite, monkeypatch):
    suite.run("--gpumem-update-baselines", source=LEAVES)
    monkeypatch.setenv("NEW", "1")
    session = suite.run()
    kept = r"kept by .grad of local variable leaves of test_leaves, test_it.py:\d+ \(list of 4\)"
    assert re.search(kept, session.flat)
    assert ".grad of the parameters" not in session.flat


def test_a_search_for_keepers_that_was_given_up_says_so(suite, monkeypatch):
    suite.run("--gpumem-update-baselines", source=LEAVES)
    monkeypatch.setenv("NEW", "1")
    monkeypatch.setattr("pytest_gpumem.recording.referrers.MAX_LEVELS", 0)
    session = suite.run()
    assert "kept by objects that were not searched, as there are too many" in session.flat
    assert "kept by local variable" not in session.flat


CHECKPOINT = """
import os
import pytest, torch

NEW = os.environ.get("NEW")


def train(model, optimizer):
    model(torch.ones(64, 1024, device="cuda")).sum().backward()
    optimizer.step(), optimizer.zero_grad()


@pytest.fixture(scope="session")
def path(tmp_path_factory):
    model = torch.nn.Linear(1024, 4096).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    path = tmp_path_factory.mktemp("runs") / "ckpt.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


@pytest.mark.gpu_memory
def test_on_the_gpu(path):
    ckpt = torch.load(path, map_location="cuda" if NEW else "cpu")
    model = torch.nn.Linear(1024, 4096).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(ckpt["model"]), optimizer.load_state_dict(ckpt["optimizer"])
    for _ in range(3):
        train(model, optimizer)


@pytest.mark.gpu_memory
def test_not_deleted(path):
    ckpt = torch.load(path, map_location="cuda")
    model = torch.nn.Linear(1024, 4096).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(ckpt["model"]), optimizer.load_state_dict(ckpt["optimizer"])
    if not NEW:
        ckpt = None
    for _ in range(3):
        train(model, optimizer)
"""


TORCH = Version(importlib.metadata.version("torch"))


def test_a_checkpoint_beside_the_model_that_loaded_it_leads(suite, monkeypatch):
    """As nanoGPT#158: the optimizer's state is the checkpoint's too, and was there before.

    With torch 2.14 and older, the optimizer takes the checkpoint's tensors as they are: the line
    has them as well, and the growth is said to be of their category.
    """
    assert suite.run("--gpumem-update-baselines", source=CHECKPOINT).ret == 0
    monkeypatch.setenv("NEW", "1")
    session = suite.run("--gpumem-json=r.json")
    for result in json.loads((suite.path / "r.json").read_text())["results"]:
        first = result["verdict"]["causes"][0]
        assert first["site"]["code"].startswith("ckpt = torch.load(")
        assert first["keepers"][0]["text"].startswith("local variable ckpt of ")
        if Version("2.15") > TORCH and "on_the_gpu" in result["nodeid"]:
            continue
        assert first["category"] == "other"
        (keeper,) = first["keepers"]
        assert re.search(
            r"local variable ckpt of .*\(dict of 2, OrderedDict of 2\)$", keeper["text"]
        )
        assert keeper["bytes"] == first["bytes"] == 16 << 20 | 16 << 10
    grew = "kept by local variable ckpt; peak allocated grew by 16.02 MiB"
    assert session.flat.count(grew) == 2


GARBAGE = """
import os
import pytest, torch

GROWN = os.environ.get("GROWN")


class Node:
    def __init__(self, data):
        self.data, self.me = data, self


def mib(n):
    return torch.empty(n << 20, device="cuda", dtype=torch.uint8)


@pytest.mark.gpu_memory
def test_it():
    net = torch.nn.Linear(8, 8, device="cuda")
    kept = []
    for _ in range(4):
        kept += [mib(2) for _ in range(3 if GROWN == "kept" else 1)]
        for _ in range(3 if GROWN == "cycles" else 1):
            Node(mib(2)[1:])
        net(torch.ones(1, 8, device="cuda"))
"""
KEEPERS = {
    "cycles": "reference cycles that Python's garbage collector has not freed yet (attribute data "
    "of Node)",
    "kept": "local variable kept of test_it",
}


@pytest.mark.parametrize("grown", KEEPERS)
def test_garbage_is_named_as_what_keeps_a_growth_only_if_it_does(suite, monkeypatch, grown):
    suite.run("--gpumem-update-baselines", source=GARBAGE)
    monkeypatch.setenv("GROWN", grown)
    session = suite.run("--gpumem-json=r.json")
    assert f"kept by {KEEPERS[grown]}" in session.flat
    (result,) = json.loads((suite.path / "r.json").read_text())["results"]
    keepers = [keeper["text"] for it in result["verdict"]["causes"] for keeper in it["keepers"]]
    assert keepers
    assert all(text.startswith(KEEPERS[grown]) for text in keepers)


def test_a_growth_without_any_hook_has_no_keeper_and_a_note_of_the_reason(suite):
    source = """
        @pytest.mark.gpu_memory
        def test_it():
            kept = [torch.empty(2**20, device="cuda") for _ in range(NUMBER)]
    """
    suite.run("--gpumem-update-baselines", source=source.replace("NUMBER", "2"))
    session = suite.run("-v", source=source.replace("NUMBER", "4"))
    assert "kept by" not in session.flat
    assert "no keeper is named, because no module's call, backward pass" in session.flat


def test_watching_for_pinned_memory_leaves_each_profiler_as_it_was():
    def of_new_threads(*_):
        """Profile nothing."""

    threading.setprofile(of_new_threads)
    before = sys.getprofile()
    try:
        with PinWatch().watching():
            assert threading.getprofile() is not of_new_threads
        assert threading.getprofile() is of_new_threads
        assert sys.getprofile() is before
    finally:
        threading.setprofile(None)
