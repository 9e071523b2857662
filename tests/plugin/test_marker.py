"""The marker: where it may stand, how levels merge, and that a mistake is one test's error."""

from __future__ import annotations

import json

import pytest


def test_the_marker_alone_measures_a_test_with_no_option_and_strict_markers(suite):
    session = suite.run(
        "--strict-markers",
        source="""
        @pytest.mark.gpu_memory
        def test_marked():
            mib(40)

        @pytest.mark.gpu_memory()
        def test_called():
            mib(50)

        def test_fixture_alone(gpu_memory):
            mib(60)

        def test_neither():
            pass
        """,
    )
    assert session.outcomes == {"passed": 4}
    assert session.figures() == {
        "test_marked": (40, 40),
        "test_called": (50, 50),
        "test_fixture_alone": (60, 60),
    }


def test_the_marker_and_its_arguments_are_listed(suite):
    assert "@pytest.mark.gpu_memory(max_gib, max_allocated_gib" in suite.run("--markers").out


def test_the_nearest_marker_wins_field_by_field(suite):
    suite.write(
        "test_it.py",
        """
        pytestmark = pytest.mark.gpu_memory(max_gib=4, batch_size=2, card="T4")

        def test_module():
            mib(1)

        @pytest.mark.gpu_memory(batch_size=8)
        class TestClass:
            def test_class(self):
                mib(1)

            @pytest.mark.gpu_memory(max_gib=1, devices=2)
            def test_function(self):
                mib(1)
                assert torch.cuda.device_count() == 2

            @pytest.mark.gpu_memory(max_gib=None, batch_size=None)
            def test_back_at_the_defaults(self):
                mib(1)
        """,
    )
    assert suite.run("--gpumem-json=a.json").outcomes == {"passed": 4}
    results = json.loads((suite.path / "a.json").read_text())["results"]
    assert [(it["budget"], it["batch_size"]) for it in results] == [
        ("max_gib=4, card='T4'", 2),
        ("max_gib=4, card='T4'", 8),
        ("max_gib=1, card='T4'", 8),
        ("card='T4'", None),
    ]


BAD = {
    "max_gb=1": "there is no argument named max_gb; write max_gib",
    "max_gib=-1": "max_gib must be a number above 0",
    "max_gib=float('nan')": "max_gib must be a number above 0",
    "max_gib=True": "max_gib must be a plain number of GiB",
    "max_gib='8GB'": "write max_gib=7.450580596923828",
    "tolerance='lots'": "write '2%'",
    "card='T5'": "T4",
    "batch_size=0": "batch_size must be a whole number",
    "rank=1": "write world_size=2",
    "world_size=0": "world_size must be a whole number from 1 to 1,000,000",
    "world_size=2, devices=2": "leave out devices, or world_size",
    "devices=17": "devices must be a whole number from 1 to 16",
    "baseline='no'": "baseline must be True or False",
    "8": "the marker takes named arguments only",
}
BAD_SOURCE = "\n".join(
    f"@pytest.mark.gpu_memory({arguments})\ndef test_bad_{i}():\n    print('RAN')\n"
    for i, arguments in enumerate(BAD)
)
GOOD_SOURCE = "@pytest.mark.gpu_memory\ndef test_good():\n    mib(40)\n\ndef test_plain(): pass\n"


def test_a_bad_argument_is_an_error_of_that_test_alone(suite):
    session = suite.run("-rE", source=BAD_SOURCE + GOOD_SOURCE)
    assert session.outcomes == {"errors": len(BAD), "passed": 2}
    assert "RAN" not in session.out
    assert "INTERNALERROR" not in session.out
    assert "Traceback" not in session.out
    for arguments, message in BAD.items():
        assert f"@pytest.mark.gpu_memory({arguments.split('=')[0]}" in session.flat
        assert message in session.flat
    assert session.verdicts() == {"test_good": "no baseline"}


def test_a_bad_argument_is_an_error_of_that_test_alone_under_xdist(suite):
    pytest.importorskip("xdist")
    session = suite.run_warm(
        "-n",
        "2",
        source="""
        import pytest

        @pytest.mark.gpu_memory(max_gb=1)
        def test_bad():
            pass

        def test_plain():
            pass
        """,
    )
    assert session.outcomes == {"errors": 1, "passed": 1}
    assert "@pytest.mark.gpu_memory(max_gb=1): there is no argument named max_gb" in session.flat
    assert "INTERNALERROR" not in session.out


def test_a_bad_argument_of_an_outer_level_is_an_error_as_well(suite):
    session = suite.run(
        source="""
        @pytest.mark.gpu_memory(max_gb=1)
        class TestIt:
            @pytest.mark.gpu_memory(max_gib=1)
            def test_it(self): pass
        """
    )
    assert session.outcomes == {"errors": 1}


def test_the_fixture_asked_for_too_late_says_to_mark_the_test(suite):
    session = suite.run(
        source="""
        def test_it(request):
            request.getfixturevalue("gpu_memory")

        @pytest.mark.gpu_memory
        def test_marked(request):
            assert request.getfixturevalue("gpu_memory").allocated == 0
        """
    )
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert "write @pytest.mark.gpu_memory" in session.flat
    assert "def gpu_memory(" not in session.out


def test_warmup_runs_the_step_before_it_is_measured(suite):
    session = suite.run(
        "-s",
        source="""
        runs = []

        @pytest.mark.gpu_memory(warmup=2)
        def test_it(gpu_memory):
            runs.append(gpu_memory.peak_allocated)
            mib(100 if len(runs) < 3 else 50)
            print("RUNS", runs)
        """,
    )
    assert "RUNS [0, 0, 0]" in session.out
    assert session.figures() == {"test_it": (50, 50)}
