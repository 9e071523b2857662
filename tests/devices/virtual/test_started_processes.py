"""A Python that a program starts works as the program itself does."""

import os
import subprocess
import sys

from helpers.sources import program
from helpers.warm import HANGS

OPERATORS = """
import subprocess, sys

@pytest.mark.gpu_memory(card="L4", baseline=False)
def test_it(capfd):
    exec({code!r}, {{}})
    here = capfd.readouterr().out
    subprocess.run([sys.executable, "-c", {code!r}], check=True)
    assert capfd.readouterr().out == here
    assert here.count("\\n") == 26
"""


def test_operators_take_and_return_the_same(suite):
    """CUB asks for which GPUs torch has kernels: it has none for an L4 alone."""
    session = suite.run(source=OPERATORS.format(code=program("operators.py")))
    assert session.outcomes == {"passed": 1}, session.out


COMPILED = """
import subprocess, sys, torch

CODE = '''
import torch
net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
compiled = torch.compile(net.cuda(), mode="max-autotune-no-cudagraphs")
compiled(torch.ones(64, 512, device="cuda")).sum().backward()
doubled = torch.compile(lambda numbers: numbers * 2)(torch.arange(5, device="cuda"))
print(doubled.tolist(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
'''
if "start" in sys.argv:
    subprocess.run([sys.executable, "-c", CODE], check=True)
else:
    exec(CODE, {})
"""


def test_compiled_code_takes_and_returns_the_same(tmp_path):
    """Kernels are not timed, max-autotune is off, values are computed; and notes say so."""
    (tmp_path / "train.py").write_text(COMPILED, encoding="utf-8")

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "pytest_gpumem", "run", "--card=L4", "train.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "-".join(arguments))},
            capture_output=True,
            text=True,
            check=False,
            timeout=HANGS,
        )
        assert not done.returncode, done.stderr
        notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
        return done.stdout, notes

    (own, own_notes), (started, notes) = run(), run("start")
    assert own.startswith("[0, 2, 4, 6, 8] ")
    assert started == own
    prefix = "note: in child processes: "
    of_child = [line.replace(prefix, "note: ") for line in notes if line.startswith(prefix)]
    assert sorted(of_child) == sorted(own_notes)
    assert any("max-autotune" in note for note in own_notes)
