"""The matrix's steps over configurations of transformers, random weights."""

# ruff: noqa: ANN401, PLR0913, PLR0917 - a step varies in many ways, of any type

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.fidelity.matrix import add
from benchmarks.fidelity.training import BF16, FP16, images, sentences, tokens, train

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


def add_steps() -> None:
    """Configurations of transformers, random weights."""

    def make(kind: str, config: str, **sizes: Any) -> nn.Module:
        import transformers

        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        return model.train()

    def own_loss(model: nn.Module, ids: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    def classes(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=labels).loss

    def pictured(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=x, labels=labels).loss

    def row(
        name: str,
        kind: str,
        config: str,
        data: Any,
        loss: Any = own_loss,
        sizes: dict | None = None,
        **more: Any,
    ) -> None:
        step = partial(train, partial(make, kind, config, **(sizes or {})), data, loss, **more)
        add(f"hf-{name}", "transformers", step, needs=("transformers",))

    def labelled(size: int) -> Callable[[], tuple]:
        return images(16, size, 2)

    row("gpt2-bf16", "GPT2LMHeadModel", "GPT2Config", tokens(8, 512, 50257), amp=BF16)
    row("gpt2-fp32", "GPT2LMHeadModel", "GPT2Config", tokens(4, 512, 50257))
    row("bert-base", "BertForSequenceClassification", "BertConfig", sentences(16, 128), classes)
    row(
        "bert-base-fp16",
        "BertForSequenceClassification",
        "BertConfig",
        sentences(16, 128),
        classes,
        amp=FP16,
    )
    row(
        "distilbert",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        sentences(16, 128),
        classes,
    )
    row(
        "roberta-mlm",
        "RobertaForMaskedLM",
        "RobertaConfig",
        sentences(8, 128),
        lambda model, ids, _: model(input_ids=ids, labels=ids).loss,
        sizes={"vocab_size": 30522},
    )
    row(
        "t5-small",
        "T5ForConditionalGeneration",
        "T5Config",
        tokens(8, 128, 32128),
        lambda model, ids, _: model(input_ids=ids.contiguous(), labels=ids.contiguous()).loss,
        sizes={"decoder_start_token_id": 0},
    )
    llama = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    }
    row(
        "llama-bf16",
        "LlamaForCausalLM",
        "LlamaConfig",
        tokens(2, 1024, 32000),
        sizes=llama,
        amp=BF16,
    )
    row(
        "mistral-pure-bf16",
        "MistralForCausalLM",
        "MistralConfig",
        tokens(2, 1024, 32000),
        sizes=llama,
        dtype=BF16,
    )
    row(
        "gpt-neo-small",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        tokens(4, 256, 50257),
        sizes={
            "hidden_size": 768,
            "num_layers": 12,
            "num_heads": 12,
            "attention_types": [[["global", "local"], 6]],
        },
    )
    row(
        "opt-125m",
        "OPTForCausalLM",
        "OPTConfig",
        tokens(4, 256, 50257),
        sizes={"vocab_size": 50272},
    )
    row("vit-base", "ViTForImageClassification", "ViTConfig", labelled(224), pictured)
