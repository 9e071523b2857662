"""What the hooks of all servers need: refusals, and the number of captured CUDA graphs."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_gpumem.devices.servers import ServerWatch

GRAPH: Final = Patch(
    "torch.cuda.graphs", "CUDAGraph.capture_end", reason="the CUDA graphs of a server are counted"
)


class Counter:
    """The number of CUDA graphs captured in a block."""

    count = 0


@contextmanager
def counting_graphs() -> Iterator[Counter]:
    """Count the CUDA graphs that the block captures."""
    cuda: Any = sys.modules["torch"].cuda
    counter = Counter()

    def counted(end: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - torch's
        counter.count += 1
        return end(*args)

    with ExitStack() as stack:
        GRAPH.wrap(cuda.graphs, wrapped_by(counted), stack)
        yield counter


@contextmanager
def reporting_refusals(watch: ServerWatch, server: str) -> Iterator[None]:
    """Report an error that the block raises for lack of memory, and let it propagate."""
    try:
        yield
    except Exception as error:
        if _is_refusal(error):
            watch.decided_for_all(server, refusal=text(error))
        raise


def free_memory(device: int) -> int:
    """Return the lowest free memory of a device so far, in bytes."""
    cuda: Any = sys.modules["torch"].cuda
    cached = cuda.max_memory_reserved(device) - cuda.memory_reserved(device)
    return int(cuda.mem_get_info(device)[0] - cached)


def text(error: BaseException) -> str:
    """Return an error's text on one line."""
    return " ".join(str(error).split())


def _is_refusal(error: BaseException) -> bool:
    """Return whether an error means that there is not enough memory."""
    torch: Any = sys.modules["torch"]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        cause = cause.__cause__
    return isinstance(error, ValueError) and "memory" in str(error).lower()
