"""Observe the start of vLLM's V1 engine (tested with vLLM 0.17 to 0.33).

On each device a worker loads the weights, runs the model once with the largest batch (the profiling
run), allocates the KV cache and captures CUDA graphs. After the profiling run the engine's core
divides the memory that the workers report as available into the cache's blocks, or refuses to
start. Worker and core may be one process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pytest_gpumem.devices.servers.common import (
    counting_graphs,
    free_memory,
    reporting_refusals,
    text,
)
from pytest_gpumem.devices.variables import SERVER_ARGUMENTS
from pytest_gpumem.patches import Patch, wrapped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from pytest_gpumem.devices.servers import ServerWatch

WORKER: Final = Patch(
    "vllm.v1.worker.gpu_worker",
    *("Worker.init_device", "Worker.load_model", "Worker.determine_available_memory"),
    *("Worker.initialize_from_config", "Worker.compile_or_warm_up_model"),
    reason="a result says what vLLM decided on memory when it started",
    versions="vLLM 0.17 to 0.33",
)
PROFILING: Final = Patch(
    WORKER.module,
    "memory_profiling",
    reason="vLLM's own figures of its profiling run are in what this returns",
    versions="vLLM 0.17 to 0.33",
)
CORE: Final = Patch(
    "vllm.v1.engine.core",
    *("get_kv_cache_configs", "EngineCore.__init__"),
    reason="vLLM refuses to start where the KV cache does not hold one request",
    versions="vLLM 0.17 to 0.33",
)
ARGUMENTS: Final = Patch(
    "vllm.engine.arg_utils",
    "EngineArgs.create_engine_config",
    reason="gpumem run looks for arguments with which vLLM starts",
    versions="vLLM 0.17 to 0.33",
)
CAPTURE: Final = "capture_model"
"""method of vLLM's model runner that captures CUDA graphs, and returns how many bytes they use"""


def watch_worker(watch: ServerWatch, module: ModuleType) -> None:
    """Report each worker's figures, and the errors with which it refuses to start."""
    wrappers: dict[str, Callable[..., Any]] = {
        "Worker.determine_available_memory": partial(_measured, watch, module),
        "Worker.initialize_from_config": partial(_sized, watch),
        "Worker.compile_or_warm_up_model": partial(_captured, watch),
    }

    def guarded(wrapper: Callable[..., Any] | None) -> Callable[..., Any]:
        def call(method: Callable[..., Any], worker: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
            with reporting_refusals(watch, _server()):
                if wrapper is None:
                    return method(worker, *args, **options)
                return wrapper(method, worker, *args, **options)

        return call

    methods = WORKER.values(module)
    WORKER.put(
        module,
        {name: wrapped_by(guarded(wrappers.get(name)))(methods[name]) for name in methods},
    )


def watch_core(watch: ServerWatch, module: ModuleType) -> None:
    """Report the KV cache that one request needs, in bytes, and vLLM's error if less is left."""

    def sized(get_configs: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401 - vLLM's
        with watch.observing(_server()):
            config, specs = arguments[:2]
            needed = max(
                sum(layer.max_memory_usage_bytes(config) for layer in layers.values())
                for layers in specs
            )
            length = config.model_config.max_model_len
            watch.decided_for_all(_server(), needed=needed, length=length)
        try:
            return get_configs(*arguments)
        except ValueError as error:
            watch.decided_for_all(_server(), refusal=text(error))
            raise

    def started(initialize: Callable[..., None], *args: Any, **options: Any) -> None:  # noqa: ANN401 - vLLM's
        initialize(*args, **options)
        watch.decided_for_all(_server(), refusal="")  # an earlier engine may have refused

    wrappers: dict[str, Callable[..., Any]] = dict(zip(CORE.names, (sized, started), strict=True))
    functions = CORE.values(module)
    CORE.put(module, {name: wrapped_by(wrappers[name])(functions[name]) for name in functions})


def replace_arguments(_watch: ServerWatch, module: ModuleType) -> None:
    """Replace the engine's arguments by those in the environment variable SERVER_ARGUMENTS."""
    arguments = json.loads(os.environ.get(SERVER_ARGUMENTS, "{}"))

    def create(create_config: Callable[..., Any], engine: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
        for name, value in arguments.items():
            ARGUMENTS.on(engine, name, value)
        return create_config(engine, *args, **options)

    if arguments:
        ARGUMENTS.wrap(module, wrapped_by(create))


HOOKS: Final = {
    WORKER.module: watch_worker,
    CORE.module: watch_core,
    ARGUMENTS.module: replace_arguments,
}
"""by name of a module of vLLM: the function to call with it once it is imported"""


def _server() -> str:
    """Return the name and version of vLLM."""
    return f"vLLM {sys.modules['vllm'].__version__}"


def _measured(
    watch: ServerWatch,
    module: ModuleType,
    determine: Callable[[Any], int],
    worker: Any,  # noqa: ANN401 - vLLM's
) -> int:
    """Run ``determine_available_memory``, and report its result and the worker's profile."""
    profiles: list[Any] = []

    @contextmanager
    def profiling(original: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:  # noqa: ANN401 - vLLM's
        with original(*args, **options) as profile:
            profiles.append(profile)
            yield profile

    with ExitStack() as stack:
        PROFILING.wrap(module, wrapped_by(profiling), stack)
        stack.enter_context(watch.profiling_run())
        available = int(determine(worker))
    with watch.observing(_server()):
        figures = {"weights": int(worker.model_runner.model_memory_usage), "cache": available}
        if profiles:  # empty if --kv-cache-memory-bytes sets the cache's size
            (profile,) = profiles
            activations, requested = profile.torch_peak_increase, int(worker.requested_memory)
            figures |= {
                "requested": requested,
                "activations": activations,
                "outside": profile.non_kv_cache_memory - figures["weights"] - activations,
                "graphs": requested - profile.non_kv_cache_memory - available,
            }
        total = worker.init_snapshot.total_memory
        watch.decided(_server(), worker.device.index, total=total, **figures)
    return available


def _sized(
    watch: ServerWatch,
    initialize: Callable[..., Any],
    worker: Any,  # noqa: ANN401 - vLLM's
    cache: Any,  # noqa: ANN401 - vLLM's
) -> Any:  # noqa: ANN401 - vLLM's
    """Report how many tokens and requests the cache holds, and run ``initialize_from_config``."""
    with watch.observing(_server()):
        config = worker.vllm_config
        tokens, requests = _capacity(config, cache)
        watch.decided(
            *(_server(), worker.device.index),
            tokens=tokens,
            requests=requests,
            length=config.model_config.max_model_len,
        )
    return initialize(worker, cache)


def _capacity(config: Any, cache: Any) -> tuple[int, int]:  # noqa: ANN401 - vLLM's
    """Return how many tokens, and requests of the longest length, a KV cache holds."""
    utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    requests = utils.get_max_concurrency_for_kv_cache_config(config, cache)
    if hasattr(utils, "get_kv_cache_capacity"):
        tokens, _ = utils.get_kv_cache_capacity(config, cache)
    else:  # vLLM 0.19 and older
        groups, parallel = cache.kv_cache_groups, config.parallel_config
        block = min(group.kv_cache_spec.block_size for group in groups)
        ranks = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
        tokens = cache.num_blocks // len(groups) * block * ranks
    return int(tokens), int(requests)


def _captured(
    watch: ServerWatch,
    warm_up: Callable[[Any], Any],
    worker: Any,  # noqa: ANN401 - vLLM's
) -> Any:  # noqa: ANN401 - vLLM's
    """Run ``compile_or_warm_up_model``, and report the CUDA graphs' memory and what is left."""
    runner, device = worker.model_runner, worker.device.index

    def captured(capture: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401 - vLLM's
        with counting_graphs() as graphs:
            taken = capture(*args, **options)
        with watch.observing(_server()):
            watch.decided(_server(), device, graphs_taken=int(taken), captured=graphs.count)
        return taken

    with ExitStack() as stack:
        if hasattr(runner, CAPTURE):
            capture = wrapped_by(captured)(getattr(runner, CAPTURE))
            Patch.on(runner, CAPTURE, capture, stack)
        result = warm_up(worker)
    with watch.observing(_server()):
        watch.decided(_server(), device, free=free_memory(device))
    watch.started()
    return result
