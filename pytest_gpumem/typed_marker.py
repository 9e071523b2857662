"""The marker as a decorator with typed arguments, for editors and type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest
    from typing_extensions import Unpack

    from pytest_gpumem.sizes import Tolerance

    Test = TypeVar("Test", bound=Callable[..., object] | type)


class Declaration(TypedDict, total=False):
    """The marker's arguments; :class:`pytest_gpumem.spec.MemorySpec` describes the fields.

    None resets a field to its default, even if a marker of the class or module sets it.
    """

    max_gib: float | None
    max_allocated_gib: float | None
    max_reserved_gib: float | None
    max_pinned_gib: float | None
    max_host_gib: float | None
    card: str | Sequence[str] | None
    batch_size: int | None
    tolerance: str | Sequence[str] | Tolerance | None
    baseline: bool | None
    devices: int | None
    warmup: int | None
    world_size: int | None
    rank: int | None
    batch_sizes: Sequence[int] | None
    max_mib_per_sample: float | None
    max_fixed_gib: float | None
    ranks: Literal["all"] | Sequence[int] | None
    variants: dict[str, Literal[True] | dict[str, Any]] | None
    max_leak_mib: float | None
    steady: bool | None
    min_cache_tokens: int | None
    values: Literal["auto", "full", "off"] | None


@overload
def gpu_memory(test: Test, /) -> Test: ...


@overload
def gpu_memory(**declared: Unpack[Declaration]) -> pytest.MarkDecorator: ...


def gpu_memory(*test: Any, **declared: Any) -> Any:
    """Mark a test: ``@gpu_memory(card="T4", batch_size=32)`` is ``@pytest.mark.gpu_memory(...)``.

    Without arguments, ``@gpu_memory``, the test is measured and compared with its baseline.

    Args:
        test: the function or class, if the decorator is used without arguments.
        declared: the marker's arguments: limits in GiB and MiB as their names say.

    Returns:
        the marker, or the marked test.
    """
    import pytest  # late: importing this package must not import pytest

    return pytest.mark.gpu_memory(*test, **declared)
