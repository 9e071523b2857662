"""No operator ends the process: a part of benchmarks/operators/fuzz.py, which has them all."""

import subprocess

from helpers.warm import HANGS, warm_python

FUZZ = "benchmarks.operators.fuzz"
OPERATORS = ("nn.functional.batch_norm", "cumsum", "nn.functional.embedding_bag")


def test_extreme_arguments_end_no_process_but_by_pytorchs_own_fault():
    """``native_batch_norm`` of no channels is PyTorch's: it shows that an end would be seen."""
    command = [warm_python(), "-m", FUZZ, "--samples", "1", "--only", *OPERATORS]
    command.append("native_batch_norm")
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, reason = done.stdout.splitlines()
    assert reason.startswith("    native_batch_norm: SIGFPE at float32, sample 0, empty: PyTorch")
    assert [name for name in OPERATORS if f"    {name}: " in done.stdout] == []
