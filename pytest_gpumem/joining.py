"""This session among those of torchrun's other ranks: where their results come together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpumem.errors import GpuMemError
from pytest_gpumem.ranks import Exchange, current_rank

if TYPE_CHECKING:
    from pytest_gpumem.gathering import Gathering


class Joining:
    """This rank's session."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @property
    def reports(self) -> bool:
        """Whether this is the rank that makes the report."""
        return self._exchange.rank.reports

    def join(self, gathering: Gathering, *, shrinkage_fails: bool) -> bool:
        """Leave the results for the first rank; or, where that is this one, take the others'.

        Returns:
            whether they are all here.
        """
        if not self.reports:
            self._exchange.give(gathering.plain())
            return False
        gathering.join(self._exchange.take(), shrinkage_fails=shrinkage_fails)
        elsewhere = self._exchange.rank.elsewhere
        if elsewhere:
            gathering.broken.append(
                f"ranks {elsewhere[0]} to {elsewhere[-1]} ran on other machines: they are not told "
                "of here, and no baselines are written"
            )
        return True

    def end(self) -> None:
        """Let the others go, or wait to be let go: with the first to fail torchrun ends all."""
        if self.reports:
            self._exchange.done()
        else:
            self._exchange.wait_until_done()


def joining() -> Joining | None:
    """Return this rank's session; None where torchrun started no others.

    Raises:
        GpuMemError: ranks cannot tell each other.
    """
    rank = current_rank()
    if rank is None:
        return None
    exchange = Exchange(rank)
    try:
        exchange.begin()
    except OSError as error:
        raise GpuMemError(
            "torchrun's ranks", f"they cannot tell each other: {error}", "set TMPDIR to a folder"
        ) from error
    return Joining(exchange)
