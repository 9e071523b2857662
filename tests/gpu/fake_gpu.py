"""A pytest plugin and a prelude for scripts: the virtual GPU in the place of a real one.

The session then uses CudaDevice over it, as it would over a driver: that tries these tests, and the
code of the CUDA device, on a machine that has no GPU (``GPUMEM_FAKE_GPU=H100 pytest tests/gpu``).
"""

import os

from pytest_gpumem.devices.cards import find_card
from pytest_gpumem.devices.virtual import device
from pytest_gpumem.meter.block import use_virtual_gpu

CARD = os.environ["GPUMEM_FAKE_GPU"]
# A real GPU has its own memory from the start, where the virtual one changes it between tests.
device.FIRST_TOTAL = find_card(CARD).total_memory
use_virtual_gpu(CARD, values="off")
# As with a real GPU, the processes that it starts (xdist's workers) look for theirs themselves.
for name in ("LD_PRELOAD", "GPUMEM_VIRTUAL"):
    os.environ.pop(name, None)
