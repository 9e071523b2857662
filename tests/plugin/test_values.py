"""Tests that decide by values on the virtual GPU: they run once, with values."""

from __future__ import annotations

import re
import sys

import pytest
from helpers.sources import program

from pytest_gpumem.devices.virtual.compilation.compiled_code import LESS_SURE, CompiledCode

DECIDES = program("decides.py")


@pytest.fixture(scope="module")
def kept_session():
    """What came of DECIDES, once it has run."""
    return {}


@pytest.fixture
def decided(kept_session, request):
    """A session of DECIDES that writes baselines; all tests look at one."""
    if not kept_session:
        suite = request.getfixturevalue("suite")
        kept_session["session"] = suite.run("--gpumem-update-baselines", source=DECIDES)
        kept_session["baselines"] = suite.baselines()
    return kept_session["session"]


def test_a_test_that_decides_by_a_value_runs_once(decided):
    """The last of them counts."""
    assert decided.outcomes == {"passed": 8, "failed": 1}, decided.out


def test_a_baseline_says_nothing_of_values_that_are_computed(decided, kept_session):
    (content,) = kept_session["baselines"].values()
    assert "test_mask" in content
    assert "reads_values" not in content


@pytest.mark.parametrize(
    ("name", "allocated"),
    [("test_mask", 20.06), ("test_computed", 33.8), ("test_kept", 14), ("test_sizes", 10)],
)
def test_a_peak_is_that_of_the_branch_and_the_size_by_the_value(decided, name, allocated):
    assert decided.figures()[name][0] == pytest.approx(allocated, abs=0.1)


def test_an_assertion_on_a_value_fails_with_the_value(decided):
    assert "test_wrong_assertion - AssertionError: assert 6 == 7" in decided.flat


def test_only_a_value_that_is_too_large_to_compute_is_noted_as_assumed(decided):
    notes = [line for line in decided.out.splitlines() if "value" in line and "note" in line]
    assert len(notes) == 1, decided.out
    assert "1 value was assumed (test_it.py:59)" in notes[0]


SIZED = """
def mask():
    return torch.arange(1 << 16, device="cuda") % 4 > 0

@pytest.mark.gpu_memory
def test_rows():
    rows = mask().to("cuda").nonzero()

@pytest.mark.gpu_memory
def test_appended():
    picked = []
    picked.append(mask()[mask()])

@pytest.mark.gpu_memory
def test_length():
    longest = mask().sum().to(torch.int32).item()
    x = torch.zeros(longest, device="cuda")

@pytest.mark.gpu_memory
def test_total():
    total, totals = 0, []
    total += mask().sum().item()
    totals.append(total)
    x = torch.zeros(max(totals), device="cuda")
"""


def test_sizes_by_values_are_those_with_all_values_whatever_the_statement(suite):
    """Each was a size of zero, without a word."""
    everything = suite.run("--gpumem-values=full", source=SIZED).figures()
    session = suite.run(source=SIZED)
    assert session.figures() == everything
    assert "note" not in session.out


@pytest.mark.parametrize("options", [("--gpumem-values=off",), ("-o", "gpumem_values=off")])
def test_without_values_they_are_zeros_and_a_note_is_made(suite, options):
    session = suite.run(*options, source=DECIDES)
    assert session.outcomes == {"passed": 7, "failed": 2}
    assert session.figures()["test_mask"][0] > 300
    assert "1 value was read back from the virtual GPU (test_it.py:59)" in session.flat
    assert "1 value was read back from the virtual GPU (test_it.py:21)" in session.flat


def test_a_marker_says_which_values_a_test_has(suite):
    source = DECIDES.replace("gpu_memory\ndef test_mask", "gpu_memory(values='off')\ndef test_mask")
    assert suite.run(source=source).figures()["test_mask"][0] > 300


WAITS = """
ROUNDS = []

def tokens_of(length):
    # As generate() of transformers does.
    tokens = torch.zeros(1, 1, dtype=torch.long, device="cuda")
    unfinished = torch.ones(1, dtype=torch.long, device="cuda")
    finished = False
    while not finished:
        ROUNDS.append(tokens.shape[1])
        tokens = torch.cat([tokens, tokens[:, -1:] + 1], 1)
        unfinished = unfinished & ~torch.full((1,), tokens.shape[1] >= length, device="cuda")
        finished = bool(unfinished.max() == 0)
    return tokens

@pytest.mark.gpu_memory
def test_waits():
    mib(20)
    assert tokens_of(32).tolist() == [list(range(32))]

@pytest.mark.gpu_memory
def test_wrong():
    assert tokens_of(32).shape[1] == 31

def test_rounds():
    assert len(ROUNDS) == 2 * 31
"""


def test_a_loop_that_waits_for_a_value_ends_as_on_a_gpu(suite):
    session = suite.run(source=WAITS)
    assert session.outcomes == {"passed": 2, "failed": 1}, session.out
    assert "test_wrong - assert 32 == 31" in session.flat
    assert session.figures()["test_waits"][0] < 21
    assert "note" not in session.flat


ASSUMES = program("assumes.py")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pytest shows notes from Python 3.11 on")
def test_a_failure_by_sizes_beside_compiled_code_says_how_to_compute_none(suite, monkeypatch):
    """With all values computed it may fail as well; an assertion on a value needs values."""
    monkeypatch.setattr(CompiledCode, "notes", lambda _: [LESS_SURE])
    session = suite.run(
        source="""
    @pytest.mark.gpu_memory
    def test_it():
        if torch.randn(5000, 5000, device="cuda").mean() > 2:
            pass
        raise RuntimeError("The expanded size of the tensor (0) must match (24)")

    @pytest.mark.gpu_memory
    def test_assertion():
        assert torch.randn(5000, 5000, device="cuda").mean() > 2
    """
    )
    assert session.outcomes == {"failed": 2}
    of_sizes, of_values = re.split("_+ test_assertion _+", session.flat)
    assert 'values="off" (--gpumem-values=off) computes none; the peak before' in of_sizes
    assert "did not compute some values: if this caused the error" not in of_sizes
    assert 'or use values="full" (--gpumem-values=full' in of_values
    assert "computes none" not in of_values


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pytest shows notes from Python 3.11 on")
def test_a_test_that_fails_itself_after_a_value_says_so_as_well(suite):
    session = suite.run(
        source="""
    @pytest.mark.gpu_memory
    def test_it():
        if not torch.randn(5000, 5000, device="cuda").mean() > 2:
            pytest.fail("the mean is too small")
    """
    )
    assert session.outcomes == {"failed": 1}
    assert "the virtual GPU did not compute some values: if this caused the error" in session.flat


FUSES = """
@torch.jit.script
def fused(x):
    return (x.sigmoid() * x + 1).relu()

def results(x):
    return [fused(x).mean().item() for _ in range(4)]  # the first two runs profile

@pytest.mark.gpu_memory
def test_it():
    x = torch.ones(8, device="cuda")
    assert results(x)[-1] > 10

@pytest.mark.gpu_memory
def test_decides():
    x = torch.ones(8, device="cuda")
    if results(x)[-1] > 10:
        pass
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pytest shows notes from Python 3.11 on")
@pytest.mark.parametrize("values", ["auto", "full"])
def test_a_failure_after_fused_torchscript_names_it_in_every_mode(suite, values):
    session = suite.run("-W", "ignore::FutureWarning", f"--gpumem-values={values}", source=FUSES)
    assert session.outcomes == {"failed": 1, "passed": 1}, session.out
    assert "TorchScript's fused code" in session.flat.split("short test summary")[0]
    assert "or use values=" not in session.flat
    assert session.flat.count("an extension) compute no values, and made all values") == 1


def test_a_failure_by_values_that_are_not_computed_says_so_and_masks_are_as_assumed(suite):
    session = suite.run(source=ASSUMES)
    assert session.outcomes == {"passed": 6, "failed": 2}
    assert session.flat.count("parameters of 2.00 MiB got no gradient in a step of SGD") == 1
    if sys.version_info >= (3, 11):
        assert session.flat.count("did not compute some values: if this caused the error") == 1
        assert "--values=full); the peak before the failure was 290.34 MiB alloc" in session.flat
    figures = session.figures()
    assert figures["test_masks[1.0]"][0] - figures["test_masks[0.0]"][0] == pytest.approx(
        99, abs=20
    )


TRAINS = program("trains.py")


def test_a_small_test_has_the_losses_of_the_cpu_in_its_one_run(suite):
    session = suite.run(source=TRAINS)
    assert session.outcomes == {"passed": 4, "failed": 2}, session.out
    assert "test_wrong - assert 0.3255" in session.flat  # the CPU's loss
    assert "test_negative - assert -0.000" in session.flat
    assert "did not compute some values: if this caused the error" not in session.flat
    assert "note" not in session.flat


WIDE_FIXTURE = """
@pytest.fixture(scope="module")
def expected():
    return torch.arange(8.0).cuda() * 2

@pytest.mark.gpu_memory(values="full")
@pytest.mark.parametrize("number", range(2))
def test_same(expected, number):
    assert torch.equal(expected, torch.arange(8.0).cuda() * 2)
"""


def test_data_parallel_trains_to_the_losses_of_the_cpu(suite):
    """Its replicas get their parameters by NCCL, within the process, and give their gradients."""
    session = suite.run(
        source="""
        from copy import deepcopy

        def losses(model, device):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            x = torch.linspace(-1, 1, 32).reshape(4, 8).to(device)
            for _ in range(3):
                loss = torch.nn.functional.cross_entropy(model(x), torch.arange(4, device=device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss.item()

        @pytest.mark.gpu_memory(devices=2)
        def test_steps():
            model = torch.nn.Sequential(
                torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)
            )
            replicated = torch.nn.DataParallel(deepcopy(model).cuda(), [0, 1])
            expected = list(losses(model, "cpu"))
            assert list(losses(replicated, "cuda")) == pytest.approx(expected, rel=1e-5)
        """
    )
    assert session.outcomes == {"passed": 1}, session.out


def test_each_test_reads_the_values_that_a_fixture_of_wider_scope_holds(suite):
    assert suite.run(source=WIDE_FIXTURE).outcomes == {"passed": 2}


WIDE_FIXTURES = program("fixtures_with_values.py")


def test_fixtures_of_wider_scope_have_values_and_so_have_tests_beside_them(suite):
    session = suite.run(source=WIDE_FIXTURES)
    assert session.outcomes == {"passed": 7}, session.out
    figures = session.figures()
    assert figures["test_mask"][0] == pytest.approx(20.1, abs=0.1)
    assert figures["test_both"][0] == pytest.approx(31.1, abs=0.1)
    assert figures["test_asks_late"][0] == pytest.approx(41, abs=0.1)
    assert not any(words in session.flat for words in ("read back from", "assumed"))
    alone = suite.run("-k", "late").figures()
    assert alone["test_asks_late"] == figures["test_asks_late"]


LOST = """
@pytest.fixture(scope="module")
def mask():
    return torch.ones(4, 2048, dtype=torch.long, device="cuda")

@pytest.fixture(scope="module")
def unasked():
    return torch.ones(4, 2048, dtype=torch.long, device="cuda")

@pytest.mark.gpu_memory
def test_known(mask, unasked):
    assert mask.all()

@pytest.mark.gpu_memory(values="off")
def test_off():
    torch.randn(300, 300, device="cuda")

@pytest.mark.gpu_memory
def test_unknown(mask):
    mib(20 if mask.all() else 10)

@pytest.mark.gpu_memory
def test_known_again(mask):
    mib(20)
"""


def test_a_test_that_made_a_fixtures_values_unknown_is_named(suite):
    session = suite.run(source=LOST)
    assert session.outcomes == {"passed": 4}
    assert session.flat.count("are unknown: test_it.py::test_off") == 1
    assert "the values of fixture 'mask' are unknown: test_it.py::test_off used the" in session.flat


REPLAYS = """
import pytest
import torch


@pytest.mark.gpu_memory(values="full")
def test_replay():
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    graph.replay()
    assert y.sum().item() == 8
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="pytest shows notes from Python 3.11 on")
def test_a_failure_by_values_that_cannot_be_computed_is_not_advised_to_compute_them(suite):
    session = suite.run(source=REPLAYS)
    assert session.outcomes == {"failed": 1}
    assert (
        "CUDA graphs compute no values; check these values on the CPU or on a real GPU; the peak"
    ) in session.flat
    assert 'use values="full"' not in session.flat


COMPILES = """
import pytest
import torch
import torch._dynamo


@torch.compile(backend="eager", fullgraph=True, dynamic=False)
def doubled(x):
    return x * 2


errors = vars(torch._dynamo.exc)
LIMIT_ERRORS = tuple(
    errors[name] for name in ("FailOnRecompileLimitHit", "RecompileLimitExceeded") if name in errors
)


def limit():
    config = torch._dynamo.config
    return getattr(config, "recompile_limit", None) or config.cache_size_limit  # of torch 2.6


def total(lengths):
    return sum(doubled(torch.ones(n, device="cuda")).sum() for n in lengths)


@pytest.mark.gpu_memory(baseline=False)
def test_reads():
    assert total(range(2, 8)) > 0
    assert limit() in (8, 16)


@pytest.mark.gpu_memory(baseline=False)
def test_leaves_the_limit():
    with pytest.raises(LIMIT_ERRORS):
        total(range(8, 20))


def test_has_the_limit_back():
    assert limit() == 8
"""


def test_a_step_that_runs_again_with_values_may_compile_as_often_as_on_a_gpu(suite):
    session = suite.run(source=COMPILES)
    assert session.outcomes == {"passed": 3}, session.out


COPIES = """
import io
import pickle

import pytest
import torch

@pytest.mark.gpu_memory(baseline=False)
def test_copies():
    model = torch.nn.BatchNorm1d(8, device="cuda")
    model(torch.randn(4, 8, device="cuda"))
    torch.save(model.state_dict(), io.BytesIO())
    pickle.dumps(model)
    torch.empty(2**24, dtype=torch.complex64, device="cuda").cpu()
    torch.empty(2**24, device="cuda").untyped_storage().cpu()
"""


def test_a_whole_copy_to_the_host_decides_nothing(suite):
    session = suite.run(source=COPIES)
    assert session.outcomes == {"passed": 1}, session.out
    assert not any(words in session.flat for words in ("read back from", "assumed"))
