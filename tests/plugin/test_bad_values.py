"""A bad value costs one test or is a usage error: no internal error, and no report or file lost."""

import itertools
from pathlib import Path

import pytest

from pytest_gpumem.errors import SpecError
from pytest_gpumem.session.settings import OPTIONS, read_settings

USAGE_ERROR = 4
BAD_OPTIONS = [
    "a\0b",
    "\ud800",
    "a" * 5000,
    "9" * 5000,
    "9" * 5000 + "%",
    "1e400MiB",
    "nan%",
    "T4," * 5000,
    "virtual:\0",
    "session:" + "9" * 5000,
    "session:٣",
    "~\0",
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_accepts_a_value_or_says_what_is_wrong(option, tmp_path):
    for value, where in itertools.product(BAD_OPTIONS, (option.flag, option.ini)):

        def get(asked, value=value, where=where):
            return (value, where) if asked is option else (asked.default, asked.ini)

        refusals = []
        try:
            read_settings(get, tmp_path)
        except SpecError as error:
            refusals.append(error)
        assert all(where in error.given and error.remedy for error in refusals)


@pytest.mark.parametrize("name", ["html", "json", "markdown", "baseline_dir", "snapshots"])
@pytest.mark.parametrize("value", ["a\0b", "a" * 300])
def test_a_path_that_no_file_can_have_is_refused_before_the_tests_run(name, value):
    def get(asked):
        return (value, asked.flag) if asked.name == name else (asked.default, asked.ini)

    with pytest.raises(SpecError, match="no file can have this name") as caught:
        read_settings(get, Path("/tmp"))
    assert len(str(caught.value)) < 300


def test_bad_values_of_markers_cost_one_test_each(suite):
    """Such of other types, without an end, too deep, with a NUL: the other tests and files stay."""
    session = suite.run(
        "--gpumem-update-baselines",
        "--gpumem-json=report.json",
        "--gpumem-attribution=off",
        source=r"""
        import itertools, os
        import numpy

        deep = []
        for _ in range(5000): deep = [deep]
        ring = []
        ring.append(ring)

        class Silent(str):
            def __repr__(self): raise ValueError
            __eq__ = __repr__
            __hash__ = str.__hash__

        ARRAY = numpy.array([1, 2])
        BAD = [
            dict(batch_sizes=range(10**9)), dict(batch_sizes=itertools.count()),
            dict(batch_sizes=deep), dict(ranks=range(10**9), world_size=8), dict(ranks=ARRAY),
            dict(values=ARRAY), dict(values=Silent("x")), dict(card=Silent("x")), dict(card="\0"),
            dict(card="\ud800"), dict(card=ARRAY), dict(max_gib="9" * 5000), dict(max_gib=10**5000),
            dict(max_gib=float("nan")), dict(max_gib=ring), dict(batch_size=2**64),
            dict(tolerance="2%, " * 9999), dict(tolerance=deep), dict(devices=10**400),
            dict(warmup=-1), dict(variants={"\0": 1}), dict(variants=ring), {"\ud800": 1},
        ]

        def bad(fields):
            @pytest.mark.gpu_memory(**fields)
            def test(): os.write(2, b"ran")
            return test

        for number, fields in enumerate(BAD):
            globals()[f"test_bad_{number}"] = bad(fields)

        @pytest.mark.gpu_memory(max_gib=1)
        def test_good(): mib(5)
        """,
    )
    assert "INTERNALERROR" not in session.out
    assert session.figures()["test_good"] == (5, 20)
    assert list(suite.baselines()) != []
    assert (suite.path / "report.json").is_file()
    counts = session.out.splitlines()[-1]
    assert " 1 passed" in counts, counts
    assert " 23 " in counts, counts
    tracebacks = [line for line in session.out.splitlines() if "pytest_gpumem" in line]
    assert tracebacks == []


@pytest.mark.parametrize("name", ["html", "baseline_dir"])
def test_a_bad_value_in_the_ini_file_is_a_usage_error(suite, name):
    suite.write("pytest.ini", f"[pytest]\ngpumem_{name} = {'a' * 5000}\n")
    session = suite.run(source="def test_it(): pass")
    assert session.ret == USAGE_ERROR
    assert f"gpumem_{name}=aaa" in session.out + session.err
