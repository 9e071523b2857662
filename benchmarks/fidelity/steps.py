"""The fidelity matrix: training steps by name and family, plain torch.cuda, three steps each.

Nothing of pytest_gpumem is used here: the same code runs on a real GPU and on the virtual one.
run.py skips a step if a package that it needs is not installed.
"""

# ruff: noqa: ANN401 - further arguments of a step have any type

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.fidelity import models_conv, models_mlp, models_recurrent
from benchmarks.fidelity.models_transformer import T5, Bert, Gpt, Llama, Vit
from benchmarks.fidelity.training import (
    BF16,
    FP16,
    by_class,
    by_label,
    by_token,
    images,
    sentences,
    tokens,
    train,
    vectors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 3
"""number of times that each step runs"""


@dataclass(frozen=True)
class Step:
    """One row of the matrix."""

    name: str
    family: str
    build: Callable[[], Callable[[], None]]
    """makes the model, data and optimizer; returns a function that runs one step"""
    needs: tuple[str, ...] = ()
    """packages besides torch"""
    capability: tuple[int, int] = (0, 0)
    """least compute capability"""


STEPS: dict[str, Step] = {}


def add(
    family: str,
    name: str,
    model: Callable[[], nn.Module],
    data: Callable[[], tuple[torch.Tensor, ...]],
    loss: Callable[..., torch.Tensor] = by_class,
    **more: Any,
) -> None:
    """Add a step to the matrix; ``more`` are fields of Step and options of train()."""
    assert name not in STEPS, name
    fields = {field: more.pop(field) for field in ("needs", "capability") if field in more}
    STEPS[name] = Step(name, family, partial(train, model, data, loss, **more), **fields)


# -- images --


def clips() -> tuple[torch.Tensor, ...]:
    """Videos and their classes."""
    x = torch.randn(4, 3, 16, 112, 112, device="cuda")
    return x, torch.randint(0, 10, (4,), device="cuda")


def pictures() -> tuple[torch.Tensor, ...]:
    """Images and their masks."""
    return torch.randn(8, 3, 256, 256, device="cuda"), torch.zeros(8, 256, 256, device="cuda")


def add_vision() -> None:
    """Convolutional networks, U-Nets, an autoencoder and vision transformers."""
    plain, resnet = models_conv.plain_convnet, models_conv.ResNet
    conv = partial(add, "conv", optimizer="sgd")
    half = {"amp": FP16, "channels_last": True}
    conv("convnet-fp32", plain, images(64, 64, 100))
    conv("convnet-channels-last-fp16", plain, images(64, 64, 100), **half)
    conv("resnet50-fp32", resnet, images(32))
    conv("resnet50-adam-bf16", resnet, images(32), optimizer="adam", amp=BF16)
    conv("resnet50-fp16-scaler", resnet, images(32), amp=FP16)
    conv("resnet50-channels-last", resnet, images(32), amp=BF16, channels_last=True)
    conv("resnet50-checkpointed", partial(resnet, recompute=True), images(32))
    conv("resnet50-accumulate-4", resnet, images(8), accumulate=4)
    conv("resnet50-benchmark", resnet, images(32), benchmark=True)
    conv("resnet101-fp32", partial(resnet, (3, 4, 23, 3)), images(32))
    conv("mobilenet-fp32", models_conv.mobile_net, images(64), optimizer="adamw")
    conv("conv3d-fp32", models_conv.conv3d_net, clips, optimizer="adamw")
    unet, net = partial(add, "unet"), models_conv.UNet
    unet("unet-fp32", net, pictures, by_label)
    unet("unet-bf16", net, pictures, by_label, amp=BF16)
    wide = partial(net, 64)
    unet("unet-wide-channels-last", wide, pictures, by_label, amp=BF16, channels_last=True)
    unet(
        "autoencoder-fp32",
        models_conv.Generator,
        lambda: (torch.randn(64, 3, 128, 128, device="cuda"),),
        lambda model, x: F.mse_loss(model(x), x),
    )
    vit, base = partial(add, "vit", data=images(32)), partial(Vit, 768, 12)
    vit("vit-small-fp32", Vit)
    vit("vit-small-bf16", Vit, amp=BF16)
    vit("vit-base-fp16-scaler", base, amp=FP16)
    vit("vit-base-pure-bf16", base, dtype=BF16)


# -- tokens --


def pairs() -> tuple[torch.Tensor, ...]:
    """Token ids of sentences, of their translations, and of the translations shifted by one."""

    def ids(length: int) -> torch.Tensor:
        return torch.randint(0, 32128, (8, length), device="cuda")

    return ids(128), ids(64), ids(64)


def translated(
    model: nn.Module, source: torch.Tensor, target: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy with one class per token of the translation."""
    return F.cross_entropy(model(source, target).flatten(0, 1), wanted.reshape(-1))


def add_language() -> None:
    """BERT, GPT-2 trained in many ways, Llama, mixtures of experts, T5."""
    bert = partial(add, "bert", model=Bert)
    bert("bert-base-fp32", data=sentences(16, 128))
    bert("bert-base-bf16", data=sentences(16, 256), amp=BF16)
    bert("bert-base-fused-clip", data=sentences(16, 128), optimizer="adamw-fused", clip=True)
    words = {"data": tokens(4, 512, 50257), "loss": by_token}
    gpt = partial(add, "gpt", **words)
    gpt("gpt2-fp32", Gpt)
    gpt("gpt2-bf16", Gpt, amp=BF16)
    gpt("gpt2-fp16-scaler", Gpt, amp=FP16)
    gpt("gpt2-fp16-default-scale", Gpt, amp=FP16, scale=65536.0)
    gpt("gpt2-dropout", partial(Gpt, dropout=0.1), amp=BF16)
    gpt("gpt2-fused", Gpt, optimizer="adamw-fused", amp=BF16)
    gpt("gpt2-loop", Gpt, optimizer="adamw-loop")
    gpt("gpt2-sgd", Gpt, optimizer="plain-sgd")
    gpt("gpt2-clip", Gpt, clip=True)
    gpt("gpt2-checkpointed", partial(Gpt, recompute=True), amp=BF16)
    gpt("gpt2-accumulate-4", Gpt, data=tokens(2, 512, 50257), amp=BF16, accumulate=4)
    sdpa = partial(add, "sdpa", model=Gpt, **words)
    sdpa("gpt2-sdpa-flash", amp=BF16, sdpa="FLASH_ATTENTION", capability=(8, 0))
    sdpa("gpt2-sdpa-efficient", amp=BF16, sdpa="EFFICIENT_ATTENTION")
    sdpa("gpt2-sdpa-math", amp=BF16, sdpa="MATH")
    sdpa("gpt2-sdpa-cudnn", amp=BF16, sdpa="CUDNN_ATTENTION", capability=(8, 0))
    sdpa("gpt2-sdpa-efficient-fp32", sdpa="EFFICIENT_ATTENTION")
    sdpa("gpt2-sdpa-math-fp32", sdpa="MATH")
    gpt("gpt2-medium-bf16", partial(Gpt, 1024, 16, 24), amp=BF16)
    words = {"data": tokens(2, 1024, 32000), "loss": by_token}
    llama, large = partial(add, "llama", **words), partial(Llama, 2048, 32, 16, 5632)
    llama("llama-fp32", Llama)
    llama("llama-bf16", Llama, amp=BF16)
    llama("llama-pure-bf16", Llama, dtype=BF16)
    llama("llama-checkpointed", partial(Llama, recompute=True), amp=BF16)
    llama("llama-1b-pure-bf16", large, dtype=BF16, optimizer="adamw-fused")
    experts = partial(Llama, 512, 8, 4, 1408, experts=8)
    add("moe", "moe-8x2-bf16", experts, **words, amp=BF16)
    add("moe", "moe-8x2-fp32", experts, **words)
    add("t5", "t5-small-fp32", T5, pairs, translated)
    add("t5", "t5-small-bf16", T5, pairs, translated, amp=BF16)


# -- recurrent networks --


def speech() -> tuple[torch.Tensor, ...]:
    """Spectrograms and the letters that are spoken."""
    return torch.randn(16, 80, 800, device="cuda"), torch.randint(1, 32, (16, 40), device="cuda")


def ctc(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """CTC loss of letters."""
    out = model(x).transpose(0, 1)
    lengths = torch.full((16,), out.shape[0]), torch.full((16,), 40)
    return F.ctc_loss(out.float(), y, *lengths)


def add_recurrent() -> None:
    """LSTM and GRU language models, and an LSTM under a CTC loss."""
    lm, net = partial(add, "rnn", data=tokens(20, 70, 10000), loss=by_token), models_recurrent
    lm("lstm-lm-fp32", net.RecurrentLm, optimizer="plain-sgd", clip=True)
    lm("lstm-lm-dropout", partial(net.RecurrentLm, dropout=0.5))
    lm("lstm-lm-fp16", net.RecurrentLm, amp=FP16)
    lm("gru-lm-fp32", partial(net.RecurrentLm, nn.GRU))
    add("rnn", "speech-lstm-ctc", net.Speech, speech, ctc)


# -- fully connected networks, and embeddings under one --


def clicks() -> tuple[torch.Tensor, ...]:
    """Four ids per sample for each of eight tables, and whether the sample was clicked."""
    ids = torch.randint(0, 1_000_000, (8, 4096, 4), device="cuda")
    return ids, torch.zeros(4096, 1, device="cuda")


def add_mlp() -> None:
    """Recommenders over embedding bags, and linear layers."""
    bags, net = partial(add, "embedding", data=clicks, loss=by_label), models_mlp.Recommender
    bags("dlrm-adagrad", net, optimizer="adagrad")
    bags("dlrm-adamw", net)
    bags("dlrm-sparse", partial(net, sparse=True), optimizer="plain-sgd")

    def linear(name: str, widths: list[int], batch: int, **more: Any) -> None:
        data = vectors(batch, widths[0], widths[-1])
        add("mlp", name, partial(models_mlp.mlp, widths), data, **more)

    linear("mlp-adamw", [1024, 4096, 1024], 8192)
    linear("mlp-wide-sgd", [784, 5000, 5000, 5000, 10], 32, optimizer="plain-sgd")
    linear("mlp-fused-fp16", [1024, 4096, 4096, 1024], 4096, optimizer="adamw-fused", amp=FP16)


def add_compiled() -> None:
    """Models that are compiled with torch.compile."""
    compiled = partial(add, "compile", compiled=True)
    compiled("mlp-compiled", partial(models_mlp.mlp, [1024, 4096, 1024]), vectors(8192, 1024, 1024))
    gpt = partial(Gpt, depth=6)
    compiled("gpt2-6-compiled-bf16", gpt, tokens(4, 512, 50257), by_token, amp=BF16)
    compiled("convnet-compiled", models_conv.plain_convnet, images(64, 64, 100), optimizer="sgd")


# -- models of libraries, random weights --


def scenes() -> tuple[torch.Tensor, ...]:
    """Images and the class of each pixel."""
    x = torch.randn(8, 3, 256, 256, device="cuda")
    return x, torch.randint(0, 21, (8, 256, 256), device="cuda")


def torchvision_model(name: str, **more: Any) -> nn.Module:
    """Make a model of torchvision."""
    import torchvision

    return torchvision.models.get_model(name, weights=None, **more)


def by_output(key: str) -> Callable[..., torch.Tensor]:
    """Return a loss: the cross-entropy of one of several outputs."""
    return lambda model, x, y: F.cross_entropy(model(x)[key], y)


def add_torchvision() -> None:
    """Models of torchvision."""

    def row(name: str, batch: int, suffix: str = "", **more: Any) -> None:
        model = partial(torchvision_model, name)
        library(f"tv-{name}{suffix}", model, images(batch), **more)

    library = partial(add, "torchvision", needs=("torchvision",))
    row("resnet18", 64, optimizer="sgd")
    row("resnet50", 32, optimizer="adam")
    row("resnet50", 32, "-bf16", optimizer="sgd", amp=BF16, channels_last=True)
    row("resnext50_32x4d", 32, optimizer="sgd")
    row("wide_resnet50_2", 32, optimizer="sgd")
    row("densenet121", 32)
    row("vgg16", 32, optimizer="sgd")
    row("alexnet", 128, optimizer="sgd")
    row("mobilenet_v3_large", 64)
    row("efficientnet_b0", 64)
    row("mnasnet1_0", 64)
    row("shufflenet_v2_x1_0", 64)
    row("regnet_y_400mf", 64)
    row("convnext_tiny", 32, amp=BF16)
    row("swin_t", 32, amp=BF16)
    row("vit_b_16", 32)
    deeplab = partial(torchvision_model, "deeplabv3_resnet50", weights_backbone=None)
    library("tv-deeplabv3_resnet50", deeplab, scenes, by_output("out"), optimizer="sgd")
    inception = partial(torchvision_model, "inception_v3", init_weights=False)

    def logits(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).logits, y)

    library("tv-inception_v3", inception, images(32, 299), logits, optimizer="sgd")


LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
GPT_NEO = {
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "attention_types": [[["global", "local"], 6]],
}


def add_transformers() -> None:
    """Models of transformers, from configurations."""

    def make(kind: str, config: str, sizes: dict[str, Any]) -> nn.Module:
        import transformers

        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        return model.train()

    def own_loss(model: nn.Module, ids: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids).loss

    def contiguous(model: nn.Module, ids: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids.contiguous(), labels=ids.contiguous()).loss

    def classes(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=labels).loss

    def pictured(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=x, labels=labels).loss

    def row(name: str, kind: str, data: Any, loss: Any = own_loss, **more: Any) -> None:
        config = f"{kind.partition('For')[0].removesuffix('LMHeadModel')}Config"
        model = partial(make, kind, config, more.pop("sizes", {}))
        add("transformers", f"hf-{name}", model, data, loss, needs=("transformers",), **more)

    short, long = sentences(16, 128), tokens(2, 1024, 32000)
    row("gpt2-bf16", "GPT2LMHeadModel", tokens(8, 512, 50257), amp=BF16)
    row("gpt2-fp32", "GPT2LMHeadModel", tokens(4, 512, 50257))
    row("bert-base", "BertForSequenceClassification", short, classes)
    row("bert-base-fp16", "BertForSequenceClassification", short, classes, amp=FP16)
    row("distilbert", "DistilBertForSequenceClassification", short, classes)
    words = {"vocab_size": 30522}
    row("roberta-mlm", "RobertaForMaskedLM", sentences(8, 128), sizes=words)
    start = {"decoder_start_token_id": 0}
    t5 = tokens(8, 128, 32128)
    row("t5-small", "T5ForConditionalGeneration", t5, contiguous, sizes=start)
    row("llama-bf16", "LlamaForCausalLM", long, sizes=LLAMA, amp=BF16)
    row("mistral-pure-bf16", "MistralForCausalLM", long, sizes=LLAMA, dtype=BF16)
    row("gpt-neo-small", "GPTNeoForCausalLM", tokens(4, 256, 50257), sizes=GPT_NEO)
    row("opt-125m", "OPTForCausalLM", tokens(4, 256, 50257), sizes={"vocab_size": 50272})
    row("vit-base", "ViTForImageClassification", images(16, 224, 2), pictured)


add_vision()
add_language()
add_recurrent()
add_mlp()
add_compiled()
add_torchvision()
add_transformers()
