"""Figures that PyTorch's own tests assert on real GPUs hold on the virtual one."""

import csv
import json
import os
import subprocess

import pytest
from helpers.paths import ROOT
from helpers.warm import HANGS, warm_python


def asserted(variant):
    text = (ROOT / "benchmarks" / "data" / "fsdp-asserted.csv").read_text(encoding="utf-8")
    lines = csv.DictReader(text.splitlines())
    return {
        f"{variant} {row['moment']}": int(row["mib"]) for row in lines if row["variant"] == variant
    }


@pytest.mark.parametrize("variant", ["plain", "checkpointed"])
def test_fsdp_of_two_ranks_holds_what_pytorchs_test_asserts_at_each_moment(variant):
    """To the MiB, in four iterations: PyTorch's test itself allows one more or less."""
    figures = asserted(variant)
    task = json.dumps({"rows": [*figures], "variant": "", "source": ""})
    done = subprocess.run(
        [warm_python(), "-m", "benchmarks.published", "fsdp", "--worker", task],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(figures) == 24
    assert json.loads(done.stdout.splitlines()[-1])[0] == figures
