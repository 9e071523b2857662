"""``gpumem cards``: list the cards that the virtual GPU can simulate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.cli.outcome import Outcome
from pytest_gpumem.devices.cards import CARDS, LIMITS, card_file_text, estimated_context
from pytest_gpumem.errors import DeviceError
from pytest_gpumem.report.text import aligned_table
from pytest_gpumem.sizes import GIB

if TYPE_CHECKING:
    import argparse


HELP: Final = "list the cards of the virtual GPU, or describe this machine's GPU"
DESCRIPTION: Final = (
    "List the cards of the virtual GPU. With --here, describe this machine's GPU as a "
    'file: gpumem cards --here > cards/mine.toml; then write card="cards/mine.toml" in a marker.'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option that describes this machine's GPU."""
    parser.add_argument(
        "--here", action="store_true", help="print a card file for this machine's first GPU"
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Return the table of all cards, or the description of this machine's GPU."""
    if arguments.here:
        import torch

        if not torch.cuda.is_available():
            problem = f"torch {torch.__version__} sees no GPU here"
            remedy = "run this command on a machine with a GPU and a CUDA build of torch"
            raise DeviceError("gpumem cards --here", problem, remedy)
        fields = described(torch.cuda.get_device_properties(0), torch.__version__)
        return Outcome(card_file_text(fields))
    titles = ("card", "memory", "for a step", "capability", "SMs", "CUDA's name")
    rows = []
    for card in CARDS.values():
        memory = (f"{nbytes / GIB:.2f} GiB" for nbytes in (card.total_memory, card.usable_memory))
        capability = "{}.{}".format(*card.capability)
        rows.append((card.name, *memory, capability, str(card.sm_count), card.device_name))
    return Outcome(aligned_table([titles, *rows], ("left", *["right"] * 4, "left")))


def described(properties: Any, torch_version: str) -> dict[str, Any]:  # noqa: ANN401 - torch's
    """Convert torch's device properties to the fields of a card's file.

    The CUDA context's size is estimated from the number of SMs, not measured: the memory in use may
    include that of other processes and libraries.
    """
    capability = properties.major, properties.minor
    if capability not in LIMITS:
        capabilities = ", ".join(f"{major}.{minor}" for major, minor in LIMITS)
        problem = "the virtual GPU does not support compute capability {}.{}".format(*capability)
        raise DeviceError(properties.name, problem, f"it supports {capabilities}")
    return {
        "device_name": properties.name,
        "total_memory": properties.total_memory,
        "capability": list(capability),
        "sm_count": properties.multi_processor_count,
        "context": estimated_context(capability, properties.multi_processor_count),
        "l2_cache_size": getattr(properties, "L2_cache_size", 0),
        "memory_bus_width": getattr(properties, "memory_bus_width", 0),
        "source": f"torch {torch_version}; context: estimated from the SM count",
    }
