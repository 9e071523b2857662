"""The fidelity matrix: training steps by name and family, plain torch.cuda, three steps each.

Nothing of pytest_gpumem is used here: the same code runs on a real GPU and on the virtual one.
A step that needs a package which is not there is left out by run.py, by name.
"""

from __future__ import annotations

from benchmarks.fidelity import (
    steps_compiled,
    steps_language,
    steps_mlp,
    steps_recurrent,
    steps_torchvision,
    steps_transformers,
    steps_vision,
)
from benchmarks.fidelity.matrix import COUNT, STEPS

__all__ = ["COUNT", "STEPS"]

for part in (
    steps_vision,
    steps_language,
    steps_recurrent,
    steps_mlp,
    steps_compiled,
    steps_torchvision,
    steps_transformers,
):
    part.add_steps()
