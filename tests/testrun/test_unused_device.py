"""A test that takes no memory of its device is never silent: it fails its limit, or has a note."""

from __future__ import annotations

import pytest

NOTE = "the test allocated no memory on H100"
REASON = "; the virtual GPU is visible only in marked tests, and test_it.py:6 looked for GPUs"
TOP = """
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

def step():
    return torch.zeros(1000, 1000, device=DEVICE)
"""


@pytest.mark.parametrize("limit", ["max_gib=8", "max_allocated_gib=8", "card='T4'"])
def test_with_a_limit_it_fails_and_the_cause_is_named(suite, limit):
    session = suite.run(
        "--gpumem-update-baselines",
        source=f"{TOP}\n@pytest.mark.gpu_memory({limit})\ndef test_it(): step()",
    )
    assert session.outcomes == {"failed": 1}
    assert f"@pytest.mark.gpu_memory({limit}" in session.flat
    assert NOTE.replace("H100", "T4" if "T4" in limit else "H100") in session.flat
    assert REASON in session.flat
    assert "--gpumem-visible=session shows the virtual GPU from the start" in session.flat
    assert "create the model and its data on gpu_memory.device" in session.flat
    assert suite.baselines() == {}


def test_without_one_it_has_a_note_and_makes_no_baseline(suite):
    session = suite.run(
        "--gpumem-update-baselines",
        source=f"{TOP}\n@pytest.mark.gpu_memory\ndef test_it(): step()",
    )
    assert session.outcomes == {"passed": 1}
    assert f"{NOTE}, and no baseline is recorded{REASON}" in session.flat
    assert suite.baselines() == {}
    session = suite.run("--gpumem-missing-baseline=fail")
    assert session.outcomes == {"failed": 1}
    assert "next: create the model and its data on gpu_memory.device" in session.flat
    assert "to record baselines" not in session.flat  # none would be


def test_the_cause_is_named_where_all_values_are_computed_too(suite):
    """No kernel runs there either."""
    mark = "@pytest.mark.gpu_memory(max_gib=8, values='full')"
    session = suite.run(source=f"{TOP}\n{mark}\ndef test_it(): step()")
    assert session.outcomes == {"failed": 1}
    assert REASON in session.flat


def test_where_nobody_has_asked_the_reason_is_a_guess(suite):
    session = suite.run(source="@pytest.mark.gpu_memory\ndef test_it(): torch.zeros(9)")
    assert (
        "if a file calls torch.cuda.is_available() at its top, the answer is False" in session.flat
    )


def test_a_library_that_chose_the_cpu_at_its_import_is_the_cause(suite):
    suite.write("bitsandbytes/__init__.py", "from bitsandbytes import cextension")
    suite.write("bitsandbytes/cextension.py", "class lib:\n    compiled_with_cuda = False")
    session = suite.run_warm(
        source="import sys\nsys.path.insert(0, '.')\nimport bitsandbytes\n"
        "@pytest.mark.gpu_memory(max_gib=8)\ndef test_it(): torch.zeros(10)",
    )
    assert "bitsandbytes was imported outside the test" in session.flat
    assert "import bitsandbytes in the test or in a fixture" in session.flat


def test_memory_of_fixtures_probes_and_parts_is_the_tests(suite):
    session = suite.run(
        source="""
        @pytest.fixture(scope="module")
        def weights():
            return mib(10)

        @pytest.mark.gpu_memory(max_gib=1)
        def test_fixture(weights): pass

        @pytest.mark.gpu_memory(max_gib=1)
        def test_search(gpu_memory):
            assert gpu_memory.largest(lambda n: mib(n), limit=5).value == 5
        """,
    )
    assert session.outcomes == {"passed": 2}
    assert "allocated no memory" not in session.out
