"""Read by mypy, likewise: the types are the package's own."""

from pytest_gpumem import measure

with measure() as found:
    pass
peak: int = found.peak_allocated
wrong: str = found.peak_allocated  # type: ignore[assignment]  # mypy --strict objects where it is no error
