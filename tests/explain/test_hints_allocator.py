"""Hints on what activations and the allocator take: float32, fragmentation."""

from __future__ import annotations

import re

import pytest
from helpers.hint_suite import HEAD, recorded_hints
from helpers.warm import warm_python

from pytest_gpumem.explain.hints import fragmentation, wastes_much
from pytest_gpumem.measurement import Peak
from pytest_gpumem.sizes import MIB


@pytest.fixture
def hints(suite):
    return recorded_hints(suite)


# -- float32 --

FORWARDS = """
    model, x = net(16, dtype=DTYPE), batch(dtype=DTYPE)
    with torch.autocast("cuda", torch.bfloat16, enabled=AUTOCAST):
        model(x).sum().backward()
"""


def forwards(dtype="torch.float32", *, autocast=False):
    return FORWARDS.replace("DTYPE", dtype).replace("AUTOCAST", str(autocast))


def test_float32_activations_are_told_with_about_half_of_them(hints):
    (hint,), full = hints("autocast", forwards())
    activations, half = map(float, re.findall(r"([\d.]+) MiB", hint))
    assert hint.startswith("activations take ")
    assert "torch.autocast('cuda', torch.bfloat16) would roughly halve them" in hint
    assert activations == 15 * 32  # the inputs of all layers but the first
    assert half == activations / 2
    found, less = hints("autocast", forwards(autocast=True))
    assert found == []
    assert full - less == pytest.approx(half, rel=0.3)


def test_bfloat16_parameters_are_no_hint(hints):
    assert hints("autocast", forwards("torch.bfloat16"))[0] == []


def test_parameters_of_two_types_are_no_hint(hints):
    assert (
        hints(
            "autocast",
            """
    net(1, dtype=torch.half)(batch(dtype=torch.half))
    net(16)(batch()).sum().backward()
    """,
        )[0]
        == []
    )


def test_where_parameters_are_the_most_it_is_no_hint(hints):
    assert (
        hints(
            "autocast",
            """
    model = net(16)
    model(batch()[:64].clone()).sum().backward()
    """,
        )[0]
        == []
    )


def test_an_older_card_is_told_of_float16(hints):
    (hint,), _ = hints("autocast", forwards(), marker="card='T4'")
    assert "torch.autocast('cuda', torch.float16)" in hint


# -- fragmentation --

FRAGMENTED = """
    keep = []
    for i in range(1, 20):
        large = mib(20 * i)
        keep.append(mib(4))
        del large
"""


def test_fragmentation_is_told_with_what_expandable_segments_reserve(suite, hints):
    """Each larger tensor needs a segment of its own: the rooms before it hold 4 MiB each."""
    import torch

    (hint,), allocated = hints("peak reserved", FRAGMENTED)
    assert allocated == 456
    above, with_them, less = map(float, re.findall(r"([\d.]+) MiB", hint))
    reserved = above + allocated
    assert with_them + less == reserved
    assert not torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    assert hints("peak reserved", FRAGMENTED, marker="values='full'")[0] == [hint]

    suite.write("conftest.py", "import torch")
    program = f"""
    import pytest_gpumem
    pytest_gpumem.use_virtual_gpu("H100")
    {HEAD.replace("import pytest, torch", "import torch").replace(chr(10), chr(10) + "    ")}
    with pytest_gpumem.measure() as measured:
    {FRAGMENTED.replace(chr(10), chr(10) + "    ")}
    print(measured.peak_reserved)
    """
    assert int(suite.python(program, python=warm_python()).out) == reserved * MIB
    suite.pytester._monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert int(suite.python(program, python=warm_python()).out) == with_them * MIB


def test_the_hint_of_a_failure_costs_a_run_and_one_of_a_success_none(suite):
    """A second one, with the setting: the first is recorded."""
    source = f"""{HEAD}
runs = []
def teardown_module():
    print("runs:", len(runs))

@pytest.mark.gpu_memory(max_reserved_gib=LIMIT)
def test_it():
    runs.append(1)
{FRAGMENTED}
"""
    session = suite.run("-s", source=source.replace("LIMIT", "1"))
    assert session.outcomes == {"failed": 1}
    assert "expandable_segments:True this step reserves 560.00 MiB" in session.flat
    assert "runs: 2" in session.out
    session = suite.run("-s", source=source.replace("LIMIT", "8"))
    assert session.outcomes == {"passed": 1}
    assert "runs: 1" in session.out
    assert "hint:" not in session.out


def test_a_step_that_does_not_fit_is_told_what_it_would_take(suite):
    mark = "@pytest.mark.gpu_memory(max_gib=0.4)"
    session = suite.run(source=f"{HEAD}\n{mark}\ndef test_it():{FRAGMENTED}")
    assert session.outcomes == {"failed": 1}
    assert "it needs 3820.00 MiB" in session.flat
    assert (
        "expandable_segments:True this step reserves 560.00 MiB, 3260.00 MiB less" in session.flat
    )


def test_little_waste_is_not_tried(hints):
    assert hints("peak reserved", "keep = [mib(100) for _ in range(9)]")[0] == []


def test_settings_of_the_allocator_are_put_back(virtual_gpu):
    from pytest_gpumem.meter.allocator import _set_allocator, expandable_segments

    def settings():
        return virtual_gpu.cuda.memory._snapshot()["allocator_settings"]

    before = settings()
    try:
        _set_allocator("max_split_size_mb:64")
        with expandable_segments() as anew:
            assert anew
            assert settings()["expandable_segments"]
            assert settings()["max_split_size"] == 64 * MIB
            with expandable_segments() as again:
                assert not again
        assert not settings()["expandable_segments"]
        assert settings()["max_split_size"] == 64 * MIB
        assert settings()["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    finally:
        _set_allocator(before["PYTORCH_CUDA_ALLOC_CONF"] or "")
    assert settings() == before


def test_a_real_gpu_is_not_asked_for_another_run(suite, monkeypatch):
    """As a GPU that computes: the hint has no number of its own."""
    monkeypatch.setattr("pytest_gpumem.measurement.DeviceInfo.is_predicted", False)
    mark = "@pytest.mark.gpu_memory(max_reserved_gib=1)"
    source = f"{HEAD}\nruns = []\n{mark}\ndef test_it():\n    runs.append(1){FRAGMENTED}"
    session = suite.run(source=f"{source}\ndef test_runs(): assert len(runs) == 1\n")
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert (
        "hint: peak reserved is 3364.00 MiB above peak allocated: the allocator's" in session.flat
    )
    assert "this step reserves" not in session.flat


PLAIN = Peak(1000 * MIB, 2000 * MIB)


@pytest.mark.parametrize(
    ("peak", "worth"),
    [
        (PLAIN, True),
        (Peak(1000 * MIB, 1512 * MIB), False),
        (Peak(1000 * MIB, 1513 * MIB), True),
        (Peak(8000 * MIB, 9999 * MIB), False),
        (Peak(8000 * MIB, 10001 * MIB), True),
    ],
)
def test_waste_is_worth_a_run_from_a_fifth_and_half_a_gib_on(peak, worth):
    assert wastes_much(peak) is worth


def test_on_a_real_gpu_no_number_is_made_up():
    assert fragmentation(PLAIN, None) == (
        "peak reserved is 1000.00 MiB above peak allocated: the allocator's memory is "
        "fragmented or cached; try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )


def test_where_expandable_segments_give_nothing_there_is_no_hint():
    assert fragmentation(PLAIN, Peak(1000 * MIB, 1990 * MIB)) == ""
    assert "1970.00 MiB, 30.00 MiB less" in fragmentation(PLAIN, Peak(1000 * MIB, 1970 * MIB))
