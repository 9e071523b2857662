"""Peaks that grow in reserved alone: the requests that took segments, and the cache beside them."""

from __future__ import annotations

import re

import pytest

INLINE = "torch.empty({} << 20, dtype=torch.uint8, device='cuda')"
UPDATE = "--gpumem-update-baselines"
BEFORE = """
@pytest.mark.gpu_memory
def test_it():
    first = mib(60)
    del first
    second = mib(60)
"""
PIECES = BEFORE.replace("    first = mib(60)\n", "    first = mib(30), mib(30)\n")
BETWEEN = """
@pytest.mark.gpu_memory
def test_it():
    first = mib(60)
    del first
    first = mib(28)
    between = mib(4)
    del first
    second = mib(40)
"""


def inlined(source):
    """A program that asks for memory on each line itself, and not in a function of its own."""
    return re.sub(r"mib\((\d+)\)", lambda size: INLINE.format(size[1]), source)


@pytest.mark.parametrize(
    ("after", "line", "reason"),
    [
        (
            PIECES,
            10,
            "requested 60.00 MiB when 60.00 MiB were cached in 2 pieces, the largest of 30.00 MiB",
        ),
        (
            BETWEEN,
            13,
            "56.00 MiB were cached in 2 pieces, the largest of 28.00 MiB; tensors of test_it.py:11",
        ),
    ],
)
def test_the_request_that_took_a_segment_is_named(suite, after, line, reason):
    suite.run(UPDATE, source=inlined(BEFORE))
    session = suite.run(source=inlined(after))
    assert session.outcomes == {"failed": 1}
    assert f" at test_it.py:{line} (test_it); peak reserved grew by " in session.flat
    assert reason in session.flat


def test_a_wider_fixture_that_the_test_sets_up_hides_no_request(suite):
    """Its snapshots are events of the allocator, in the first test alone."""
    fixture = '@pytest.fixture(scope="module")\ndef config(tmp_path_factory):\n    return {}\n'
    programs = [
        fixture + inlined(program).replace("def test_it():", "def test_it(config):")
        for program in (BEFORE, PIECES)
    ]
    suite.run(UPDATE, source=programs[0])
    session = suite.run(source=programs[1])
    assert " at test_it.py:14 (test_it); peak reserved grew by " in session.flat
    assert "requested 60.00 MiB when 60.00 MiB were cached in 2 pieces" in session.flat
