"""Attach inference servers' starts to a test's measurement, for its verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_gpumem.devices.servers import PROFILING_RUN
from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.judge.server_start import with_unknown

if TYPE_CHECKING:
    from pytest_gpumem.measurement import Measurement, ServerStart
    from pytest_gpumem.testrun.judging import EndedTest


class ServerStartsStage:
    """Adds servers' figures to the measurement of the profiling run, else of the whole test."""

    def applies(self, test: EndedTest) -> bool:
        """See :class:`Stage`."""
        return bool(test.servers) or test.run.spec.min_cache_tokens is not None

    def __call__(self, test: EndedTest) -> EndedTest:
        """See :class:`Stage`."""
        spec = test.run.spec
        # Leave out refused starts: the test passed, so it expected them.
        servers = tuple(start for start in test.servers if not start.refusal)
        if not servers and spec.min_cache_tokens is None:
            return test
        if not servers:
            problem = "no inference server that is known started in this test"
            remedy = "start vLLM or SGLang in the test, or leave out min_cache_tokens"
            raise GpuMemError(f"min_cache_tokens={spec.min_cache_tokens}", problem, remedy)
        part = PROFILING_RUN if PROFILING_RUN in test.measured else ""
        declared, measurement = test.measured[part]
        declared = replace(declared, min_cache_tokens=spec.min_cache_tokens)
        measured = declared, with_servers(measurement, servers)
        return test._replace(measured={**test.measured, part: measured})


def with_servers(measurement: Measurement, servers: tuple[ServerStart, ...]) -> Measurement:
    """Return a measurement with servers' starts.

    On the virtual GPU each start gets bounds of the additional memory that a real GPU uses.
    """
    if measurement.device.is_predicted:
        servers = tuple(with_unknown(start, len(servers)) for start in servers)
    return replace(measurement, servers=servers)
