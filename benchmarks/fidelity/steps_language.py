"""The matrix's steps over tokens: transformers with and without a decoder."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.fidelity import models_transformer as m
from benchmarks.fidelity.matrix import add
from benchmarks.fidelity.training import BF16, FP16, by_class, by_token, sentences, tokens, train

GPT = tokens(4, 512, 50257)
LLAMA = tokens(2, 1024, 32000)


def bert() -> None:
    """BERT."""
    add("bert-base-fp32", "bert", partial(train, m.Bert, sentences(16, 128), by_class))
    add("bert-base-bf16", "bert", partial(train, m.Bert, sentences(16, 256), by_class, amp=BF16))
    add(
        "bert-base-fused-clip",
        "bert",
        partial(train, m.Bert, sentences(16, 128), by_class, optimizer="adamw-fused", clip=True),
    )


def gpt() -> None:
    """GPT-2, trained in many ways."""
    add("gpt2-fp32", "gpt", partial(train, m.Gpt, GPT, by_token))
    add("gpt2-bf16", "gpt", partial(train, m.Gpt, GPT, by_token, amp=BF16))
    add("gpt2-fp16-scaler", "gpt", partial(train, m.Gpt, GPT, by_token, amp=FP16))
    add(
        "gpt2-fp16-default-scale",
        "gpt",
        partial(train, m.Gpt, GPT, by_token, amp=FP16, scale=65536.0),
    )
    add("gpt2-dropout", "gpt", partial(train, partial(m.Gpt, dropout=0.1), GPT, by_token, amp=BF16))
    add(
        "gpt2-fused", "gpt", partial(train, m.Gpt, GPT, by_token, optimizer="adamw-fused", amp=BF16)
    )
    add("gpt2-loop", "gpt", partial(train, m.Gpt, GPT, by_token, optimizer="adamw-loop"))
    add("gpt2-sgd", "gpt", partial(train, m.Gpt, GPT, by_token, optimizer="plain-sgd"))
    add("gpt2-clip", "gpt", partial(train, m.Gpt, GPT, by_token, clip=True))
    add(
        "gpt2-checkpointed",
        "gpt",
        partial(train, partial(m.Gpt, recompute=True), GPT, by_token, amp=BF16),
    )
    add(
        "gpt2-accumulate-4",
        "gpt",
        partial(train, m.Gpt, tokens(2, 512, 50257), by_token, amp=BF16, accumulate=4),
    )


def sdpa() -> None:
    """GPT-2 with each kind of scaled_dot_product_attention."""
    for kind, word in (
        ("FLASH_ATTENTION", "flash"),
        ("EFFICIENT_ATTENTION", "efficient"),
        ("MATH", "math"),
        ("CUDNN_ATTENTION", "cudnn"),
    ):
        least = (8, 0) if word in {"flash", "cudnn"} else (0, 0)
        add(
            f"gpt2-sdpa-{word}",
            "sdpa",
            partial(train, m.Gpt, GPT, by_token, amp=BF16, sdpa=kind),
            capability=least,
        )
    add(
        "gpt2-sdpa-efficient-fp32",
        "sdpa",
        partial(train, m.Gpt, GPT, by_token, sdpa="EFFICIENT_ATTENTION"),
    )
    add("gpt2-sdpa-math-fp32", "sdpa", partial(train, m.Gpt, GPT, by_token, sdpa="MATH"))


def gpt_medium() -> None:
    """GPT-2 of the next size."""
    add(
        "gpt2-medium-bf16",
        "gpt",
        partial(train, partial(m.Gpt, 1024, 16, 24), GPT, by_token, amp=BF16),
    )


def llama() -> None:
    """Llama."""
    add("llama-fp32", "llama", partial(train, m.Llama, LLAMA, by_token))
    add("llama-bf16", "llama", partial(train, m.Llama, LLAMA, by_token, amp=BF16))
    add("llama-pure-bf16", "llama", partial(train, m.Llama, LLAMA, by_token, dtype=BF16))
    add(
        "llama-checkpointed",
        "llama",
        partial(train, partial(m.Llama, recompute=True), LLAMA, by_token, amp=BF16),
    )
    add(
        "llama-1b-pure-bf16",
        "llama",
        partial(
            train,
            partial(m.Llama, 2048, 32, 16, 5632),
            LLAMA,
            by_token,
            dtype=BF16,
            optimizer="adamw-fused",
        ),
    )


def moe() -> None:
    """Llama with mixtures of experts."""
    add(
        "moe-8x2-bf16",
        "moe",
        partial(train, partial(m.Llama, 512, 8, 4, 1408, experts=8), LLAMA, by_token, amp=BF16),
    )
    add(
        "moe-8x2-fp32",
        "moe",
        partial(train, partial(m.Llama, 512, 8, 4, 1408, experts=8), LLAMA, by_token),
    )


def pairs() -> tuple:
    """Token ids of sentences, of their translations, and the next ones of these."""

    def ids(length: int) -> torch.Tensor:
        return torch.randint(0, 32128, (8, length), device="cuda")

    return ids(128), ids(64), ids(64)


def translated(
    model: nn.Module, source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of one class a token of the translation."""
    return F.cross_entropy(model(source, target).flatten(0, 1), wanted.reshape(-1))


def t5() -> None:
    """T5."""
    add("t5-small-fp32", "t5", partial(train, m.T5, pairs, translated))
    add("t5-small-bf16", "t5", partial(train, m.T5, pairs, translated, amp=BF16))


def add_steps() -> None:
    """Put these steps into the matrix."""
    bert()
    gpt()
    sdpa()
    gpt_medium()
    llama()
    moe()
    t5()
