"""The examples' deliberate regression is explained by its true line."""

import os
import subprocess

import pytest
from helpers.paths import ROOT
from helpers.warm import HANGS, warm_python


@pytest.fixture
def same_torch(virtual_gpu):
    """The committed baselines belong to a version of torch."""
    if not virtual_gpu.__version__.startswith("2.15.0"):
        pytest.skip(f"the baselines are torch 2.15.0's, this is {virtual_gpu.__version__}")


def run(**environment):
    command = [warm_python(), "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, "examples/test_regression.py"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "140", **environment},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    return done.returncode, " ".join(done.stdout.split())


def test_the_regression_is_explained_by_its_true_line(same_torch):
    source = (ROOT / "examples/test_regression.py").read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "losses.append(cross_entropy(" in text)
    status, said = run(GPUMEM_EXAMPLE_REGRESSION="1")
    assert status == 1
    cause = f"+120.00 MiB activations examples/test_regression.py:{line} in validate"
    assert cause in said


def test_without_it_the_example_passes(same_torch):
    status, said = run(GPUMEM_EXAMPLE_REGRESSION="0")
    assert status == 0, said
