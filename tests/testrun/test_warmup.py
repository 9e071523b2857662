"""A warm-up counts for no figure."""

from __future__ import annotations


def test_a_part_has_no_peak_of_the_warm_up(suite):
    session = suite.run(
        source="""
        runs = []

        @pytest.mark.gpu_memory(warmup=1)
        def test_it(gpu_memory):
            runs.append(None)
            with gpu_memory.measure("part"):
                mib(50 if len(runs) > 1 else 400)
        """
    )
    assert session.figures() == {"test_it": (50, 50), "test_it (part)": (50, 50)}


def test_an_error_of_a_second_run_that_unittest_keeps_to_itself_is_none_of_the_tests(suite):
    """The second run is for the sake of its recording; only the first one counts."""
    session = suite.run(
        source="""
        import unittest

        runs = []

        @pytest.mark.gpu_memory(max_allocated_gib=0.01)
        class TestIt(unittest.TestCase):
            def test_it(self):
                runs.append(mib(100))
                assert len(runs) == 1, "the second run"
        """
    )
    assert session.outcomes == {"failed": 1}
    assert "over budget: peak allocated of 100.00 MiB" in session.flat
    assert "the second run" not in session.out
