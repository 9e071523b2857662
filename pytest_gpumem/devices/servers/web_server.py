"""End an inference server's HTTP process once it has started; otherwise it would run for ever."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.variables import UNTIL_STARTED
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import ModuleType

    from pytest_gpumem.devices.servers import ServerWatch

STARTUP: Final = Patch(
    "uvicorn.server",
    "Server.startup",
    reason="a server ends by itself once it has started, with gpumem run --until-started",
)


def end_once_started(_watch: ServerWatch, module: ModuleType) -> None:
    """Make each uvicorn server exit after its start, as after SIGTERM, if UNTIL_STARTED is set."""

    async def start(startup: Callable[..., Awaitable[None]], *args: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's
        await startup(*args, **options)
        args[0].should_exit = True

    if os.environ.get(UNTIL_STARTED):
        STARTUP.wrap(module, wrapped_by(start))


HOOKS: Final = {STARTUP.module: end_once_started}
