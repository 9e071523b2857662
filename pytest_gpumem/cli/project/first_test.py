"""A first test, of a model or of a step that the project has.

The input of a model is found by trying: its first layer tells what it takes, and the model is run
once on PyTorch's meta device, where nothing is computed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gpumem.cli.project.settings_file import NewFile
from pytest_gpumem.cli.step_function import find_module, find_name, takes_size
from pytest_gpumem.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

NAME: Final = "test_gpu_memory.py"
OF_MODEL: Final = """\
import pytest
import torch
from {module} import {name}


@pytest.mark.gpu_memory(batch_size={batch_size})
def test_{lower}_step(gpu_memory):
    model = {name}().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # AdamW makes its state at the end of the first step
        inputs = {inputs}
        loss = {loss}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
OF_STEP: Final = """\
import pytest
from {module} import {name}


@pytest.mark.gpu_memory({declared})
def test_{lower}({fixture}):
    {name}({argument})
"""
UNKNOWN_INPUT: Final = "..."
ADVICE: Final = "the input of {name} is unknown: write it in the test, at inputs = ..."
TOKENS: Final = 128
"""tokens of a sequence in a first test"""
SIDES: Final = (224, 64, 32, 28)
"""sides of images that are tried"""


class _Input(NamedTuple):
    """An input of a model: how the test makes it, and what tries it."""

    code: str
    make: Callable[[Any], object]
    """makes it on the meta device, of torch"""


def first_test(root: Path, target: str, batch_size: int) -> tuple[NewFile, list[str]]:
    """Return the file of a first test, and advice about it.

    Args:
        root: the project's folder.
        target: "models.py:Net", "package.models:Net", "train.py:step", or a module alone.
        batch_size: that it declares.

    Raises:
        SpecError: there is no such module or name, or it cannot be tested as it is.
        Exception: any of the module's own, while it is imported.
    """
    import torch

    place, _, name = target.partition(":")
    module = find_module(target, place)
    if not name:
        name = _only_model(target, module, torch.nn.Module)
    subject = find_name(target, module, name)
    imported = _import_name(root, place, module)
    where = root / NAME
    if (root / "tests").is_dir() and _is_installed(root, imported):
        where = root / "tests" / NAME
    lower = name.replace(".", "_").lower()
    if not (inspect.isclass(subject) and issubclass(subject, torch.nn.Module)):
        sized = takes_size(target, subject)
        source = OF_STEP.format(
            module=imported,
            name=name,
            lower=lower,
            declared=f"batch_size={batch_size}" if sized else "",
            fixture="gpu_memory" if sized else "",
            argument="gpu_memory.batch_size" if sized else "",
        )
        return NewFile(where, source.replace("gpu_memory()", "gpu_memory")), []
    inputs, loss = _tried(target, subject, torch, batch_size)
    source = OF_MODEL.format(
        module=imported, name=name, lower=lower, batch_size=batch_size, inputs=inputs, loss=loss
    )
    advice = [ADVICE.format(name=name)] if inputs == UNKNOWN_INPUT else []
    return NewFile(where, source), advice


def _only_model(target: str, module: ModuleType, base: type) -> str:
    """Return the name of the module's own model; it has to have one."""
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, base)
        and value.__module__ == module.__name__
    ]
    if len(names) != 1:
        has = f"it has {', '.join(names)}" if names else "this file has no torch.nn.Module"
        example = names[-1] if names else "step"
        raise SpecError(target, has, f"name one, as {target}:{example}")
    return names[0]


def _import_name(root: Path, place: str, module: ModuleType) -> str:
    """Return the name by which a test imports the module."""
    if not place.endswith(".py"):
        return module.__name__
    path = Path(place).resolve()
    try:
        parts = path.relative_to(root).with_suffix("").parts
    except ValueError:
        return module.__name__
    if parts[0] == "src" and len(parts) > 1 and _is_installed(root, parts[1]):
        parts = parts[1:]
    return ".".join(parts)


def _is_installed(root: Path, name: str) -> bool:
    """Return whether a module can be imported from anywhere, and not from this folder alone."""
    top = name.partition(".")[0]
    old_path = sys.path[:]
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != root]
    loaded = {key: sys.modules.pop(key) for key in (top,) if key in sys.modules}
    try:
        importlib.invalidate_caches()
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path[:] = old_path
        sys.modules.update(loaded)


def _tried(target: str, model: type, torch: Any, batch_size: int) -> tuple[str, str]:  # noqa: ANN401 - a module
    """Return the code of an input that a model takes, and of a loss; "..." where none is known."""
    try:
        with torch.device("meta"):
            tried = model()
    except TypeError as error:
        raise SpecError(
            target,
            f"this class cannot be created without arguments ({error})",
            "name a function that trains one step, or give its arguments defaults",
        ) from None
    for option in _inputs(tried, torch, batch_size):
        try:
            with torch.device("meta"):
                output = tried(option.make(torch))
        except Exception:  # noqa: BLE001, S112 - the model's own: it takes another input
            continue
        return option.code, _loss_of(output, torch)
    return UNKNOWN_INPUT, "model(inputs).sum()"


def _inputs(model: Any, torch: Any, batch_size: int) -> Iterator[_Input]:  # noqa: ANN401 - of torch
    """Yield inputs that a model may take, by its first layer that tells."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Embedding):
            yield _tokens(batch_size, layer.num_embeddings)
        for kind, dimensions in (("Conv1d", 1), ("Conv2d", 2), ("Conv3d", 3)):
            if isinstance(layer, getattr(torch.nn, kind)):
                for side in SIDES:
                    yield _random_input(batch_size, (layer.in_channels, *[side] * dimensions))
        if isinstance(layer, torch.nn.Linear):
            yield _random_input(batch_size, (layer.in_features,))
            yield _random_input(batch_size, (TOKENS, layer.in_features))
        if isinstance(layer, torch.nn.LayerNorm):
            yield _random_input(batch_size, (TOKENS, *layer.normalized_shape))
        if isinstance(layer, (torch.nn.Embedding, torch.nn.Linear)) or hasattr(
            layer, "in_channels"
        ):
            return


def _tokens(batch_size: int, words: int) -> _Input:
    code = f'torch.randint({words}, (gpu_memory.batch_size, {TOKENS}), device="cuda")'
    return _Input(code, lambda torch: torch.randint(words, (batch_size, TOKENS)))


def _random_input(batch_size: int, sizes: tuple[int, ...]) -> _Input:
    shape = ", ".join(map(str, sizes))
    code = f'torch.randn(gpu_memory.batch_size, {shape}, device="cuda")'
    return _Input(code, lambda torch: torch.randn(batch_size, *sizes))


def _loss_of(output: Any, torch: Any) -> str:  # noqa: ANN401 - of the model
    """Return the code of a number to train by, of what a model returned."""
    if isinstance(output, torch.Tensor):
        return "model(inputs).float().mean()"
    for name in ("loss", "logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), torch.Tensor):
            return f"model(inputs).{name}.float().mean()"
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        return "model(inputs)[0].float().mean()"
    return "model(inputs).sum()"
