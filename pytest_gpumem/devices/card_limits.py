"""The limits of each compute capability, from the CUDA C++ Programming Guide."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_gpumem.sizes import KIB

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class ArchLimits:
    """The limits of one compute capability; shared memory in bytes, registers of 32 bits.

    Attributes:
        shared_memory_per_block: of a block that does not opt in.
        shared_memory_per_block_optin: the most by ``cudaFuncSetAttribute``.
        reserved_shared_memory_per_block: taken by CUDA itself from each block.
    """

    max_threads_per_sm: int
    max_blocks_per_sm: int
    shared_memory_per_sm: int
    shared_memory_per_block_optin: int
    reserved_shared_memory_per_block: int = KIB
    shared_memory_per_block: int = 48 * KIB
    registers_per_sm: int = 65536


def _limits(
    threads: int, blocks: int, sm_kib: int, block_kib: int, reserved_kib: int = 1
) -> ArchLimits:
    return ArchLimits(
        max_threads_per_sm=threads,
        max_blocks_per_sm=blocks,
        shared_memory_per_sm=sm_kib * KIB,
        shared_memory_per_block_optin=block_kib * KIB,
        reserved_shared_memory_per_block=reserved_kib * KIB,
    )


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (7.0: CUDA 12's; the
# others: CUDA 13's). CUDA keeps 1 KiB of each block's shared memory from 8.0 on (tuning guides).
LIMITS: Mapping[tuple[int, int], ArchLimits] = MappingProxyType(
    {
        (7, 0): _limits(threads=2048, blocks=32, sm_kib=96, block_kib=96, reserved_kib=0),
        (7, 5): _limits(threads=1024, blocks=16, sm_kib=64, block_kib=64, reserved_kib=0),
        (8, 0): _limits(threads=2048, blocks=32, sm_kib=164, block_kib=163),
        (8, 6): _limits(threads=1536, blocks=16, sm_kib=100, block_kib=99),
        (8, 9): _limits(threads=1536, blocks=24, sm_kib=100, block_kib=99),
        (9, 0): _limits(threads=2048, blocks=32, sm_kib=228, block_kib=227),
        (10, 0): _limits(threads=2048, blocks=32, sm_kib=228, block_kib=227),
        (12, 0): _limits(threads=1536, blocks=24, sm_kib=100, block_kib=99),
    }
)
