"""The fixture, and ``pytest_gpumem.measure``."""

from __future__ import annotations

import pytest


def test_what_the_fixture_tells(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory(batch_size=16, devices=2)
        def test_it(gpu_memory):
            assert gpu_memory.batch_size == 16
            assert gpu_memory.device == torch.device("cuda:0")
            assert gpu_memory.devices == [torch.device("cuda:0"), torch.device("cuda:1")]
            assert gpu_memory.card == "H100"
            assert gpu_memory.computes is False
            assert gpu_memory.allocated == gpu_memory.reserved == gpu_memory.peak_allocated == 0
            kept = mib(40)
            mib(60, "cuda:1")
            assert gpu_memory.allocated == 40 << 20
            assert gpu_memory.reserved == 60 << 20
            assert gpu_memory.peak.allocated == gpu_memory.peak_allocated == 60 << 20
            assert gpu_memory.peak.reserved == gpu_memory.peak_reserved == 60 << 20

        @pytest.mark.gpu_memory
        def test_no_batch_size(gpu_memory):
            with pytest.raises(ValueError, match="the marker declares no batch size"):
                gpu_memory.batch_size
        """
    )
    assert session.outcomes == {"passed": 2}


@pytest.mark.parametrize(
    "call",
    [
        "gpu_memory.batch_size",
        "gpu_memory.assume(masks=2)",
        "gpu_memory.largest(print, limit=0)",
        "gpu_memory.scaling(print, [1])",
        'gpu_memory.measure("a", max_gib=-1)',
        'gpu_memory.measure("a", at_most="eager")',
    ],
)
def test_a_mistake_shows_the_line_of_the_test_and_none_of_this_package(suite, call):
    source = f"@pytest.mark.gpu_memory\ndef test_it(gpu_memory):\n    {call}"
    session = suite.run(source=source)
    assert session.outcomes == {"failed": 1}
    assert f">       {call}" in session.out
    assert "SpecError: gpu_memory." in session.out
    assert "pytest_gpumem/" not in session.out


def test_parts_have_figures_budgets_and_baselines_of_their_own(suite):
    source = """
        @pytest.mark.gpu_memory
        def test_it(gpu_memory):
            before = mib(20)
            with gpu_memory.measure("one", max_allocated_gib=LIMIT) as one:
                mib(100)
            with gpu_memory.measure("two", baseline=False) as two:
                mib(40)
            with gpu_memory.measure("one", max_allocated_gib=LIMIT):
                mib(50)
            assert (one.peak_allocated, one.peak_reserved) == (120 << 20, 120 << 20)
            assert two.peak_allocated == 60 << 20
            assert gpu_memory.peak_allocated == 120 << 20
            mib(200)
    """
    session = suite.run("--gpumem-update-baselines", source=source.replace("LIMIT", "1"))
    assert session.outcomes == {"passed": 1}
    figures = {name: allocated for name, (allocated, _) in session.figures().items()}
    assert figures == {"test_it": 220, "test_it (one)": 120, "test_it (two)": 60}
    recorded = {name: allocated for name, (allocated, _) in suite.baselined().items()}
    assert recorded == {"test_it.py::test_it": 220, "test_it.py::test_it (one)": 120}

    grown = source.replace("LIMIT", "1").replace("mib(100)", "mib(200)").replace("120 <<", "220 <<")
    session = suite.run(source=grown)
    assert session.verdicts() == {
        "test_it": "improved",  # the allocator's cache serves the rest of the test
        "test_it (one)": "regressed",
        "test_it (two)": "ok",
    }
    assert "part one: regressed: " in session.flat

    session = suite.run("-m", "gpu_memory", source=source.replace("LIMIT", "0.1"))
    assert session.verdicts()["test_it (one)"] == "over budget"


def test_a_part_that_is_over_its_limit_or_runs_out_of_memory(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory
        def test_limit(gpu_memory):
            with gpu_memory.measure("small", max_allocated_gib=0.1):
                mib(200)

        @pytest.mark.gpu_memory(max_gib=4, batch_size=3)
        def test_cap(gpu_memory):
            kept = mib(300)
            with gpu_memory.measure("inner", max_gib=1):
                kept = [mib(300) for _ in range(4)]

        @pytest.mark.gpu_memory(max_gib=1)
        def test_of_the_test(gpu_memory):
            with gpu_memory.measure("inner"):
                mib(1200)

        @pytest.mark.gpu_memory(max_gib=2)
        def test_cap_ends_with_the_part(gpu_memory):
            with gpu_memory.measure("inner", max_gib=1):
                with pytest.raises(torch.OutOfMemoryError):
                    mib(1200)
            mib(1200)
        """
    )
    assert session.outcomes == {"failed": 3, "passed": 1}
    assert session.verdicts() == {
        "test_limit": "no baseline",
        "test_limit (small)": "over budget",
        "test_cap (inner)": "out of memory",
        "test_of_the_test": "out of memory",
        "test_cap_ends_with_the_part": "no baseline",
        "test_cap_ends_with_the_part (inner)": "no baseline",
    }
    assert "batch size 3 does not fit in max_gib=1 (1024.00 MiB)" in session.flat
    assert "it needs 1500.00 MiB" in session.flat
    assert "part inner" in session.flat


def test_mistakes_in_a_part_fail_where_they_are_made(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory
        @pytest.mark.parametrize(("name", "more", "words"), [
            ("", {}, "needs a name"),
            (3, {}, "needs a name"),
            ("a", {"max_gb": 1}, "write max_gib"),
            ("a", {"devices": 2}, "is for the whole test"),
        ])
        def test_it(gpu_memory, name, more, words):
            with pytest.raises(ValueError, match=words):
                with gpu_memory.measure(name, **more):
                    pass
        """
    )
    assert session.outcomes == {"passed": 4}


def test_the_marker_alone_measures_what_function_fixtures_make(suite):
    session = suite.run(
        source="""
        @pytest.fixture
        def model():
            mib(300)
            return mib(100)

        @pytest.mark.gpu_memory
        def test_it(model):
            mib(20)
        """
    )
    assert session.figures() == {"test_it": (300, 300)}


def test_measure_in_a_marked_test_is_a_part_and_leaves_the_test_whole(suite):
    session = suite.run(
        source="""
        import pytest_gpumem

        @pytest.mark.gpu_memory
        def test_it(gpu_memory):
            mib(100)
            kept = mib(10)
            with pytest_gpumem.measure() as m:
                mib(40)
                with pytest_gpumem.measure() as inner:
                    mib(20)
                mib(30)
            assert m.peak_allocated == 50 << 20
            assert m.peak_reserved == 100 << 20  # the cache counts
            assert inner.peak_allocated == 30 << 20
            with pytest_gpumem.measure() as again:
                with pytest.raises(pytest_gpumem.GpuMemError, match="the block has not ended"):
                    again.peak_allocated
        """
    )
    assert session.outcomes == {"passed": 1}
    assert session.figures() == {"test_it": (100, 100)}


def test_measure_outside_of_pytest_twice_and_importing_it_imports_neither(suite):
    done = suite.python(
        """
        import sys
        import pytest_gpumem
        assert {"torch", "pytest", "_pytest", "msgspec"}.isdisjoint(sys.modules)
        pytest_gpumem.use_virtual_gpu("T4")
        import torch
        model = torch.nn.Linear(1000, 1000, device="cuda")
        for _ in range(2):
            with pytest_gpumem.measure() as m:
                torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
            print(m.peak_allocated - (100 << 20), m.measurement.device.name, m.peaks[0].reserved)
        try:
            with pytest_gpumem.measure() as m:
                torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            print("out of memory", m.peak_allocated)
        """
    )
    # torch 2.14 warns of each allocation that fails
    assert [line for line in done.err.splitlines() if "CUDACachingAllocator.cpp" not in line] == []
    first, second, last = done.out.splitlines()
    assert first == second == "4004352 T4 127926272"
    assert last == "out of memory 4004352"


def test_blocks_of_one_part_declare_the_same(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory
        def test_it(gpu_memory):
            for _ in range(2):
                with gpu_memory.measure("twice", max_gib=1):
                    pass
            with gpu_memory.measure("twice"):
                pass
        """
    )
    assert session.outcomes == {"failed": 1}
    assert (
        "gpu_memory.measure('twice'): an earlier block with this name declares other limits; "
        "declare the same in each of them, or give this block another name"
    ) in session.flat
