"""The matrix's steps over models that torch.compile makes kernels for."""

from __future__ import annotations

from functools import partial

from benchmarks.fidelity.matrix import add
from benchmarks.fidelity.models_conv import plain_convnet
from benchmarks.fidelity.models_mlp import mlp
from benchmarks.fidelity.models_transformer import Gpt
from benchmarks.fidelity.training import BF16, by_class, by_token, images, tokens, train, vectors


def add_steps() -> None:
    """Put these steps into the matrix."""
    add(
        "mlp-compiled",
        "compile",
        partial(
            train,
            partial(mlp, [1024, 4096, 1024]),
            vectors(8192, 1024, 1024),
            by_class,
            compiled=True,
        ),
    )
    add(
        "gpt2-6-compiled-bf16",
        "compile",
        partial(
            train, partial(Gpt, depth=6), tokens(4, 512, 50257), by_token, amp=BF16, compiled=True
        ),
    )
    add(
        "convnet-compiled",
        "compile",
        partial(
            train, plain_convnet, images(64, 64, 100), by_class, optimizer="sgd", compiled=True
        ),
    )
