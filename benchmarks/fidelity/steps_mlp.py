"""The matrix's steps over fully connected networks, and over embeddings under one."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.fidelity import models_mlp as m
from benchmarks.fidelity.matrix import add
from benchmarks.fidelity.training import FP16, by_class, by_label, train, vectors


def clicks() -> tuple:
    """Ids for each of eight tables, four a sample, and whether it was clicked on."""
    return torch.randint(0, 1_000_000, (8, 4096, 4), device="cuda"), torch.zeros(
        4096, 1, device="cuda"
    )


def embedding() -> None:
    """Recommenders over embedding bags."""
    add(
        "dlrm-adagrad",
        "embedding",
        partial(train, m.Recommender, clicks, by_label, optimizer="adagrad"),
    )
    add("dlrm-adamw", "embedding", partial(train, m.Recommender, clicks, by_label))
    add(
        "dlrm-sparse",
        "embedding",
        partial(
            train, partial(m.Recommender, sparse=True), clicks, by_label, optimizer="plain-sgd"
        ),
    )


def mlp() -> None:
    """Linear layers."""
    add(
        "mlp-adamw",
        "mlp",
        partial(train, partial(m.mlp, [1024, 4096, 1024]), vectors(8192, 1024, 1024), by_class),
    )
    add(
        "mlp-wide-sgd",
        "mlp",
        partial(
            train,
            partial(m.mlp, [784, 5000, 5000, 5000, 10]),
            vectors(32, 784, 10),
            by_class,
            optimizer="plain-sgd",
        ),
    )
    add(
        "mlp-fused-fp16",
        "mlp",
        partial(
            train,
            partial(m.mlp, [1024, 4096, 4096, 1024]),
            vectors(4096, 1024, 1024),
            by_class,
            optimizer="adamw-fused",
            amp=FP16,
        ),
    )


def add_steps() -> None:
    """Put these steps into the matrix."""
    embedding()
    mlp()
