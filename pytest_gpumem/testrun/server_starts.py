"""What an inference server decided when it started in a test, for the test's verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pytest_gpumem.devices.servers import PROFILING_RUN
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.sizes import MIB

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Measurement, ServerStart
    from pytest_gpumem.testrun.judging import EndedTest

UNSEEN: Final = (0, 512 * MIB)
UNSEEN_BY_RANKS: Final = (0, 2560 * MIB)


class ServerStartsStage:
    """Adds a server's decisions to the measurement of its profiling run."""

    def applies(self, test: EndedTest) -> bool:
        """See :class:`Stage`."""
        return bool(test.servers) or test.run.spec.min_cache_tokens is not None

    def __call__(self, test: EndedTest) -> EndedTest:
        """See :class:`Stage`."""
        spec = test.run.spec
        if not test.servers:
            problem = "no inference server that is known started in this test"
            remedy = "start vLLM in the test, or leave out min_cache_tokens"
            raise GpuMemError(f"min_cache_tokens={spec.min_cache_tokens}", problem, remedy)
        part = PROFILING_RUN if PROFILING_RUN in test.measured else ""
        declared, measurement = test.measured[part]
        declared = replace(declared, min_cache_tokens=spec.min_cache_tokens)
        measured = declared, with_servers(measurement, test.servers)
        return test._replace(measured={**test.measured, part: measured})


def with_servers(measurement: Measurement, servers: tuple[ServerStart, ...]) -> Measurement:
    """Return a measurement with a server's starts.

    On the virtual GPU they have the range of what a real GPU uses in addition: its kernels are
    loaded when they first run, and NCCL has buffers between several GPUs.
    """
    if measurement.device.is_predicted:
        unseen = UNSEEN if len(servers) == 1 else UNSEEN_BY_RANKS
        servers = tuple(replace(start, unseen=unseen) for start in servers)
    return replace(measurement, servers=servers)
