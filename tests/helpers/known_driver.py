"""Cache the GPUs that the driver of this machine lists, once per process and environment.

The plugin starts another process to query the driver at the beginning of each session: a tenth of
the time of a small session.
"""

import os

from pytest_gpumem.devices import select

READ = ("LD_", "CUDA_", "NVIDIA_")
"""prefixes of the variables that affect which driver is found, and which GPUs it lists"""


def ask_once():
    """Make ``select`` cache the driver's answers; ``driver`` itself still queries each time."""
    ask, answers = select.visible_gpus, {}

    def ask_or_remember():
        key = tuple(sorted(item for item in os.environ.items() if item[0].startswith(READ)))
        if key not in answers:
            answers[key] = ask()
        return answers[key]

    select.visible_gpus = ask_or_remember
