"""The fidelity matrix: training steps by name and family, plain torch.cuda, three steps each.

Nothing of pytest_gpumem is used here: the same code runs on a real GPU and on the virtual one.
A step that needs a package which is not there is left out by run.py, by name.
"""

# ruff: noqa: ANN401, PLR0913, PLR0917 - a step varies in many ways, of any type

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import models as m
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COUNT = 3
"""how often each step is run"""


@dataclass(frozen=True)
class Step:
    """One row of the matrix."""

    name: str
    family: str
    build: Callable[[], Callable[[], None]]
    """makes model, data and optimizer, and returns what runs one step"""
    needs: tuple[str, ...] = ()
    """packages besides torch"""
    capability: tuple[int, int] = (0, 0)
    """least compute capability"""


STEPS: dict[str, Step] = {}


def add(name: str, family: str, build: Callable[[], Callable[[], None]], **more: Any) -> None:
    """Put a step into the matrix."""
    assert name not in STEPS, name
    STEPS[name] = Step(name, family, build, **more)


# -- data: made on the device, within the range of what reads it --


def images(batch: int, size: int = 224, classes: int = 1000) -> Callable[[], tuple]:
    """Images and their classes."""
    return lambda: (
        torch.randn(batch, 3, size, size, device="cuda"),
        torch.randint(0, classes, (batch,), device="cuda"),
    )


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple]:
    """Token ids and the next ones."""

    def make() -> tuple:
        ids = torch.randint(0, vocabulary, (batch, length + 1), device="cuda")
        return ids[:, :-1], ids[:, 1:]

    return make


def vectors(batch: int, inputs: int, classes: int) -> Callable[[], tuple]:
    """Feature vectors and classes."""
    return lambda: (
        torch.randn(batch, inputs, device="cuda"),
        torch.randint(0, classes, (batch,), device="cuda"),
    )


# -- losses --


def by_class(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of one class a sample."""
    return F.cross_entropy(model(x), y)


def by_token(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of one class a token."""
    return F.cross_entropy(model(x).flatten(0, 1), y.reshape(-1))


# -- one training step --

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "plain-sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    "sparse-adam": lambda p: torch.optim.SparseAdam(p, lr=1e-3),
}


def attention(kind: str) -> Any:
    """Allow one kind of scaled_dot_product_attention only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, kind)) if kind else contextlib.nullcontext()


def train(
    make: Callable[[], nn.Module],
    data: Callable[[], tuple],
    loss: Callable[..., torch.Tensor],
    *,
    optimizer: str = "adamw",
    amp: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    accumulate: int = 1,
    channels_last: bool = False,
    compiled: bool = False,
    sdpa: str = "",
    clip: bool = False,
    benchmark: bool = False,
    scale: float = 1024.0,
) -> Callable[[], None]:
    """Return one training step over a fresh model, as a usual loop has it."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = benchmark
    model = make().cuda()
    if dtype is not None:
        model = model.to(dtype)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    steps = OPTIMIZERS[optimizer](model.parameters())
    called = torch.compile(model) if compiled else model
    scaler = torch.amp.GradScaler(init_scale=scale) if amp is torch.float16 else None

    def step() -> None:
        steps.zero_grad()
        for _ in range(accumulate):
            batch = data()
            if channels_last:
                batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
            if dtype is not None and batch[0].is_floating_point():
                batch = (batch[0].to(dtype), *batch[1:])
            autocast = torch.autocast("cuda", dtype=amp, enabled=amp is not None)
            with autocast, attention(sdpa):
                value = loss(called, *batch) / accumulate
            (scaler.scale(value) if scaler else value).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler:
            scaler.step(steps)
            scaler.update()
        else:
            steps.step()

    return step


BF16, FP16 = torch.bfloat16, torch.float16


def hand_made() -> None:  # noqa: PLR0915 - one a row
    """Steps that need torch alone."""
    a, t = add, partial
    a(
        "convnet-fp32",
        "conv",
        t(train, m.plain_convnet, images(64, 64, 100), by_class, optimizer="sgd"),
    )
    a(
        "convnet-channels-last-fp16",
        "conv",
        t(
            train,
            m.plain_convnet,
            images(64, 64, 100),
            by_class,
            optimizer="sgd",
            amp=FP16,
            channels_last=True,
        ),
    )
    a("resnet50-fp32", "conv", t(train, m.ResNet, images(32), by_class, optimizer="sgd"))
    a(
        "resnet50-adam-bf16",
        "conv",
        t(train, m.ResNet, images(32), by_class, optimizer="adam", amp=BF16),
    )
    a(
        "resnet50-fp16-scaler",
        "conv",
        t(train, m.ResNet, images(32), by_class, optimizer="sgd", amp=FP16),
    )
    a(
        "resnet50-channels-last",
        "conv",
        t(train, m.ResNet, images(32), by_class, optimizer="sgd", amp=BF16, channels_last=True),
    )
    a(
        "resnet50-checkpointed",
        "conv",
        t(train, t(m.ResNet, recompute=True), images(32), by_class, optimizer="sgd"),
    )
    a(
        "resnet50-accumulate-4",
        "conv",
        t(train, m.ResNet, images(8), by_class, optimizer="sgd", accumulate=4),
    )
    a(
        "resnet50-benchmark",
        "conv",
        t(train, m.ResNet, images(32), by_class, optimizer="sgd", benchmark=True),
    )
    a(
        "resnet101-fp32",
        "conv",
        t(train, t(m.ResNet, (3, 4, 23, 3)), images(32), by_class, optimizer="sgd"),
    )
    a("mobilenet-fp32", "conv", t(train, m.mobile_net, images(64), by_class))
    a(
        "conv3d-fp32",
        "conv",
        t(
            train,
            m.conv3d_net,
            lambda: (
                torch.randn(4, 3, 16, 112, 112, device="cuda"),
                torch.randint(0, 10, (4,), device="cuda"),
            ),
            by_class,
        ),
    )

    def mask(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(x), y)

    def pictures() -> tuple:
        return torch.randn(8, 3, 256, 256, device="cuda"), torch.zeros(8, 256, 256, device="cuda")

    a("unet-fp32", "unet", t(train, m.UNet, pictures, mask))
    a("unet-bf16", "unet", t(train, m.UNet, pictures, mask, amp=BF16))
    a(
        "unet-wide-channels-last",
        "unet",
        t(train, t(m.UNet, 64), pictures, mask, amp=BF16, channels_last=True),
    )
    a(
        "autoencoder-fp32",
        "unet",
        t(
            train,
            m.Generator,
            lambda: (torch.randn(64, 3, 128, 128, device="cuda"),),
            lambda model, x: F.mse_loss(model(x), x),
        ),
    )

    a("vit-small-fp32", "vit", t(train, m.Vit, images(32), by_class))
    a("vit-small-bf16", "vit", t(train, m.Vit, images(32), by_class, amp=BF16))
    a("vit-base-fp16-scaler", "vit", t(train, t(m.Vit, 768, 12), images(32), by_class, amp=FP16))
    a("vit-base-pure-bf16", "vit", t(train, t(m.Vit, 768, 12), images(32), by_class, dtype=BF16))

    a("bert-base-fp32", "bert", t(train, m.Bert, sentences(16, 128), by_class))
    a("bert-base-bf16", "bert", t(train, m.Bert, sentences(16, 256), by_class, amp=BF16))
    a(
        "bert-base-fused-clip",
        "bert",
        t(train, m.Bert, sentences(16, 128), by_class, optimizer="adamw-fused", clip=True),
    )

    gpt = tokens(4, 512, 50257)
    a("gpt2-fp32", "gpt", t(train, m.Gpt, gpt, by_token))
    a("gpt2-bf16", "gpt", t(train, m.Gpt, gpt, by_token, amp=BF16))
    a("gpt2-fp16-scaler", "gpt", t(train, m.Gpt, gpt, by_token, amp=FP16))
    a("gpt2-fp16-default-scale", "gpt", t(train, m.Gpt, gpt, by_token, amp=FP16, scale=65536.0))
    a("gpt2-dropout", "gpt", t(train, t(m.Gpt, dropout=0.1), gpt, by_token, amp=BF16))
    a("gpt2-fused", "gpt", t(train, m.Gpt, gpt, by_token, optimizer="adamw-fused", amp=BF16))
    a("gpt2-loop", "gpt", t(train, m.Gpt, gpt, by_token, optimizer="adamw-loop"))
    a("gpt2-sgd", "gpt", t(train, m.Gpt, gpt, by_token, optimizer="plain-sgd"))
    a("gpt2-clip", "gpt", t(train, m.Gpt, gpt, by_token, clip=True))
    a("gpt2-checkpointed", "gpt", t(train, t(m.Gpt, recompute=True), gpt, by_token, amp=BF16))
    a(
        "gpt2-accumulate-4",
        "gpt",
        t(train, m.Gpt, tokens(2, 512, 50257), by_token, amp=BF16, accumulate=4),
    )
    for kind, word in (
        ("FLASH_ATTENTION", "flash"),
        ("EFFICIENT_ATTENTION", "efficient"),
        ("MATH", "math"),
        ("CUDNN_ATTENTION", "cudnn"),
    ):
        least = (8, 0) if word in {"flash", "cudnn"} else (0, 0)
        a(
            f"gpt2-sdpa-{word}",
            "sdpa",
            t(train, m.Gpt, gpt, by_token, amp=BF16, sdpa=kind),
            capability=least,
        )
    a(
        "gpt2-sdpa-efficient-fp32",
        "sdpa",
        t(train, m.Gpt, gpt, by_token, sdpa="EFFICIENT_ATTENTION"),
    )
    a("gpt2-sdpa-math-fp32", "sdpa", t(train, m.Gpt, gpt, by_token, sdpa="MATH"))
    a("gpt2-medium-bf16", "gpt", t(train, t(m.Gpt, 1024, 16, 24), gpt, by_token, amp=BF16))

    llama = tokens(2, 1024, 32000)
    a("llama-fp32", "llama", t(train, m.Llama, llama, by_token))
    a("llama-bf16", "llama", t(train, m.Llama, llama, by_token, amp=BF16))
    a("llama-pure-bf16", "llama", t(train, m.Llama, llama, by_token, dtype=BF16))
    a(
        "llama-checkpointed",
        "llama",
        t(train, t(m.Llama, recompute=True), llama, by_token, amp=BF16),
    )
    a(
        "llama-1b-pure-bf16",
        "llama",
        t(
            train,
            t(m.Llama, 2048, 32, 16, 5632),
            llama,
            by_token,
            dtype=BF16,
            optimizer="adamw-fused",
        ),
    )
    a(
        "moe-8x2-bf16",
        "moe",
        t(train, t(m.Llama, 512, 8, 4, 1408, experts=8), llama, by_token, amp=BF16),
    )
    a("moe-8x2-fp32", "moe", t(train, t(m.Llama, 512, 8, 4, 1408, experts=8), llama, by_token))

    def pairs() -> tuple:
        def ids(length: int) -> torch.Tensor:
            return torch.randint(0, 32128, (8, length), device="cuda")

        return ids(128), ids(64), ids(64)

    def translated(model: nn.Module, source: Any, target: Any, wanted: Any) -> torch.Tensor:
        return F.cross_entropy(model(source, target).flatten(0, 1), wanted.reshape(-1))

    a("t5-small-fp32", "t5", t(train, m.T5, pairs, translated))
    a("t5-small-bf16", "t5", t(train, m.T5, pairs, translated, amp=BF16))

    words = tokens(20, 70, 10000)
    a(
        "lstm-lm-fp32",
        "rnn",
        t(train, m.RecurrentLm, words, by_token, optimizer="plain-sgd", clip=True),
    )
    a("lstm-lm-dropout", "rnn", t(train, t(m.RecurrentLm, dropout=0.5), words, by_token))
    a("lstm-lm-fp16", "rnn", t(train, m.RecurrentLm, words, by_token, amp=FP16))
    a("gru-lm-fp32", "rnn", t(train, t(m.RecurrentLm, nn.GRU), words, by_token))

    def speech() -> tuple:
        return torch.randn(16, 80, 800, device="cuda"), torch.randint(
            1, 32, (16, 40), device="cuda"
        )

    def ctc(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x).transpose(0, 1)
        lengths = torch.full((16,), out.shape[0]), torch.full((16,), 40)
        return F.ctc_loss(out.float(), y, *lengths)

    a("speech-lstm-ctc", "rnn", t(train, m.Speech, speech, ctc))

    def clicks() -> tuple:
        return torch.randint(0, 1_000_000, (8, 4096, 4), device="cuda"), torch.zeros(
            4096, 1, device="cuda"
        )

    a("dlrm-adagrad", "embedding", t(train, m.Recommender, clicks, mask, optimizer="adagrad"))
    a("dlrm-adamw", "embedding", t(train, m.Recommender, clicks, mask))
    a(
        "dlrm-sparse",
        "embedding",
        t(train, t(m.Recommender, sparse=True), clicks, mask, optimizer="plain-sgd"),
    )

    a(
        "mlp-adamw",
        "mlp",
        t(train, t(m.mlp, [1024, 4096, 1024]), vectors(8192, 1024, 1024), by_class),
    )
    a(
        "mlp-wide-sgd",
        "mlp",
        t(
            train,
            t(m.mlp, [784, 5000, 5000, 5000, 10]),
            vectors(32, 784, 10),
            by_class,
            optimizer="plain-sgd",
        ),
    )
    a(
        "mlp-fused-fp16",
        "mlp",
        t(
            train,
            t(m.mlp, [1024, 4096, 4096, 1024]),
            vectors(4096, 1024, 1024),
            by_class,
            optimizer="adamw-fused",
            amp=FP16,
        ),
    )

    a(
        "mlp-compiled",
        "compile",
        t(train, t(m.mlp, [1024, 4096, 1024]), vectors(8192, 1024, 1024), by_class, compiled=True),
    )
    a(
        "gpt2-6-compiled-bf16",
        "compile",
        t(train, t(m.Gpt, depth=6), gpt, by_token, amp=BF16, compiled=True),
    )
    a(
        "convnet-compiled",
        "compile",
        t(train, m.plain_convnet, images(64, 64, 100), by_class, optimizer="sgd", compiled=True),
    )


def sentences(batch: int, length: int) -> Callable[[], tuple]:
    """Token ids and a class a sentence."""
    return lambda: (
        torch.randint(0, 30522, (batch, length), device="cuda"),
        torch.randint(0, 2, (batch,), device="cuda"),
    )


def of_torchvision() -> None:
    """Torchvision's models, random weights."""

    def make(name: str) -> nn.Module:
        import torchvision

        return torchvision.models.get_model(name, weights=None)

    def inception(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).logits, y)

    def densely(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x)["out"], y)

    def row(name: str, batch: int, suffix: str = "", **more: Any) -> None:
        step = partial(train, partial(make, name), images(batch), by_class, **more)
        add(f"tv-{name}{suffix}", "torchvision", step, needs=("torchvision",))

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
    add(
        "tv-deeplabv3_resnet50",
        "torchvision",
        partial(
            train,
            lambda: __import__("torchvision").models.segmentation.deeplabv3_resnet50(
                weights=None, weights_backbone=None
            ),
            lambda: (
                torch.randn(8, 3, 256, 256, device="cuda"),
                torch.randint(0, 21, (8, 256, 256), device="cuda"),
            ),
            densely,
            optimizer="sgd",
        ),
        needs=("torchvision",),
    )
    add(
        "tv-inception_v3",
        "torchvision",
        partial(
            train,
            lambda: __import__("torchvision").models.inception_v3(weights=None, init_weights=False),
            images(32, 299),
            inception,
            optimizer="sgd",
        ),
        needs=("torchvision",),
    )


def of_transformers() -> None:
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


hand_made()
of_torchvision()
of_transformers()


def families() -> Iterator[str]:
    """Yield each family once, in order."""
    yield from dict.fromkeys(step.family for step in STEPS.values())
