"""Observe the start of SGLang (tested with SGLang 0.5.23).

A scheduler process on each device loads the weights, allocates the KV cache and captures CUDA
graphs. The cache gets a share of the memory (``mem_fraction_static``) minus the weights. SGLang
runs the model for the first time after that, in the memory outside of the share.
"""

from __future__ import annotations

import _thread
import inspect
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.servers.common import counting_graphs, free_memory, reporting_refusals
from pytest_gpumem.devices.variables import UNTIL_STARTED
from pytest_gpumem.patches import Patch, wrapped_by
from pytest_gpumem.sizes import GIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from pytest_gpumem.devices.servers import ServerWatch

RUNNER: Final = Patch(
    "sglang.srt.model_executor.model_runner",
    *("ModelRunner.load_model", "ModelRunner.alloc_memory_pool"),
    *("ModelRunner.init_cuda_graphs", "ModelRunner.post_capture_resize_kv_pool"),
    reason="a result says what SGLang decided on memory when it started",
    versions="SGLang 0.5.23",
)
CACHE: Final = Patch(
    "sglang.srt.mem_cache.kv_cache_configurator",
    "KVCacheConfigurator._profile_available_bytes",
    reason="this returns the memory that SGLang leaves for its KV cache",
    versions="SGLang 0.5.23",
)
KILLING: Final = Patch(
    "sglang.srt.utils.common",
    "kill_process_tree",
    reason="SGLang kills its own process if its start fails, and no result would be printed",
)
_KEPT: Final[list[object]] = []
"""the frame in which SGLang ended the process: it keeps the local variables of all callers alive"""
WARMUP: Final = Patch(
    "sglang.srt.entrypoints.http_server",
    "_wait_and_warmup",
    reason="SGLang waits two minutes for the answer of a server that has ended",
)


def watch_runner(watch: ServerWatch, module: ModuleType) -> None:
    """Report each device's figures, and the errors with which SGLang refuses to start."""
    wrappers = dict(zip(RUNNER.names, (_loaded, _allocated, _captured, _allocated), strict=True))

    def guarded(report: Callable[..., None]) -> Callable[..., Any]:
        def call(method: Callable[..., Any], runner: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - SGLang's
            with reporting_refusals(watch, _server()), counting_graphs() as graphs:
                result = method(runner, *args, **options)
            if not runner.is_draft_worker:
                with watch.observing(_server()):
                    report(watch, runner, graphs.count)
            return result

        return call

    methods = RUNNER.values(module)
    RUNNER.put(
        module,
        {name: wrapped_by(guarded(wrappers[name]))(methods[name]) for name in methods},
    )


def watch_cache(watch: ServerWatch, module: ModuleType) -> None:
    """Report the memory that SGLang leaves for its KV cache."""

    def profiled(
        profile: Callable[..., int],
        configurator: Any,  # noqa: ANN401 - SGLang's
        pre_model_load_memory: float,
    ) -> int:
        cache = profile(configurator, pre_model_load_memory)
        with watch.observing(_server()):
            device = configurator.gpu_id
            free, total = sys.modules["torch"].cuda.mem_get_info(device)
            requested = int(pre_model_load_memory * GIB) - (free - cache)
            watch.decided(_server(), device, cache=cache, requested=requested, total=total)
        return cache

    CACHE.wrap(module, wrapped_by(profiled))


def end_instead(_watch: ServerWatch, module: ModuleType) -> None:
    """Make SGLang end its own process by an exception in the main thread, not by SIGKILL."""

    def kill(kill_tree: Callable[..., None], process: int | None, **options: Any) -> None:  # noqa: ANN401 - SGLang's
        if process != os.getpid():
            kill_tree(process, **options)
            return
        ends = options.pop("include_parent", True)
        with suppress(ValueError):  # not in the main thread
            # SGLang's watchdog takes the end of its processes for a crash, and sends SIGQUIT:
            # ignore the signal. The next start of a server sets SGLang's handler again.
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        kill_tree(process, include_parent=False, **options)
        if not ends:
            return
        # Keep the callers' local variables, and with them SGLang's ZeroMQ context: its deletion
        # would wait for ever for sockets of the killed processes.
        _KEPT.append(inspect.currentframe())
        if threading.current_thread() is threading.main_thread():
            sys.exit(1)
        _thread.interrupt_main()

    KILLING.wrap(module, wrapped_by(kill))


def skip_warmup(_watch: ServerWatch, module: ModuleType) -> None:
    """Skip the warm-up request if UNTIL_STARTED is set: the server ends once it has started."""
    if os.environ.get(UNTIL_STARTED):
        WARMUP.put(module, {name: lambda *_, **__: None for name in WARMUP.names})


HOOKS: Final = {
    RUNNER.module: watch_runner,
    CACHE.module: watch_cache,
    KILLING.module: end_instead,
    WARMUP.module: skip_warmup,
}
"""by name of a module of SGLang: the function to call with it once it is imported"""


def _server() -> str:
    """Return the name and version of SGLang."""
    return f"SGLang {sys.modules['sglang'].__version__}"


def _loaded(watch: ServerWatch, runner: Any, _graphs: int) -> None:  # noqa: ANN401 - SGLang's
    weights = int(runner.weight_load_mem_usage * GIB)
    watch.decided(_server(), runner.gpu_id, weights=weights)


def _allocated(watch: ServerWatch, runner: Any, _graphs: int) -> None:  # noqa: ANN401 - SGLang's
    tokens, length = int(runner.max_total_num_tokens), int(runner.model_config.context_len)
    requests = tokens // length
    watch.decided(_server(), runner.gpu_id, tokens=tokens, requests=requests, length=length)


def _captured(watch: ServerWatch, runner: Any, graphs: int) -> None:  # noqa: ANN401 - SGLang's
    watch.decided(
        *(_server(), runner.gpu_id),
        graphs_taken=int(sum(runner.graph_memory_usage.values()) * GIB),
        captured=graphs,
        free=free_memory(runner.gpu_id),
    )
    watch.decided_for_all(_server(), refusal="")  # an earlier engine may have refused
    watch.started()
