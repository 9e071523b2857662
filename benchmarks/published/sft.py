r"""Fine-tuning of Qwen3.5: peaks on a real GPU that FakeGPU publishes, beside its own estimates.

    python -m benchmarks.published sft --python 2.8=PYTHON --python 2.12=PYTHON

Each interpreter has the rows' torch, transformers 5.12.1, PEFT, and the DeepSpeed that
data/README.md names. The models have the shapes of the source's checkpoints, without their weights.
The NF4 layers are rewritten, with the same temporaries as the source's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from benchmarks.harness import GIB, line, read, spread, table
from benchmarks.published.inference import keep_values_unset
from benchmarks.published.runner import looked, unseen
from pytest_gpumem.devices.cards import CARDS

if TYPE_CHECKING:
    import torch

    from benchmarks.published.runner import Answers, Process, Row
    from pytest_gpumem.devices.cards import Card

PACKAGES = ("transformers", "peft", "deepspeed")
SHAPES = {"0.8B": (1024, 3584), "2B": (2048, 6144)}
"""hidden and intermediate size"""
LAYERS, VOCABULARY, RANK, ALPHA = 24, 248_320, 8, 16
BUCKET = 5_000_000
"""number of elements in a bucket of ZeRO"""
BLOCK, SCALES = 64, 256
"""number of weights per scale, and of scales per scale of scales"""
DIGIT = 0.0005
"""GiB by which a figure may have been rounded"""


def rows() -> list[Row]:
    """Return the rows, in the order of the file."""
    return read("sft-peaks.csv")


def card(row: Row) -> Card:
    """Return the row's card."""
    return CARDS[row["card"]]


def step(row: Row, process: Process) -> list[float]:
    """Run a row; return its peak in GiB and its number of trained parameters."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.initialization import no_init_weights

    process.device.values.compute("auto")
    keep_values_unset()
    hidden, intermediate = SHAPES[row["model"]]
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with no_init_weights():
        model = Qwen3_5ForCausalLM._from_config(config, attn_implementation="sdpa")
    model.tie_weights()
    torch.set_default_dtype(torch.float32)
    if row["method"] == "lora":
        from peft import LoraConfig, get_peft_model

        options = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    elif row["method"] != "full":
        use_nf4(model, nested=row["method"].startswith("nested"))
    if row["checkpointed"] == "1":
        options = {"use_reentrant": bool(row["zero"])}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if row["method"] != "full":
            model.enable_input_require_grads()
    model.train()
    ranks = int(row["ranks"])
    with process.device.join_alone(0, ranks, by_program=False) if ranks > 1 else nullcontext():
        if row["zero"]:
            return trained_by_deepspeed(row, model)
        return trained_once(row, sharded(model, row["method"], ranks))


def sharded(model: torch.nn.Module, method: str, ranks: int) -> torch.nn.Module:
    """Return a model on the GPU, sharded by FSDP1 for full training, by FSDP2 with adapters."""
    import torch

    if ranks == 1 or method != "full":
        model.to("cuda")
    if ranks == 1:
        return model
    layers = next(it for it in model.modules() if isinstance(it, torch.nn.ModuleList))
    if method == "full":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
            device_id=torch.device("cuda", 0),
            backward_prefetch=None,
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (ranks,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return model


def trained_once(row: Row, model: torch.nn.Module) -> list[float]:
    """Train one step; return the peak in GiB and the number of trained parameters."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False)
    count, tokens = int(row["accumulated"]), int(row["tokens"])
    batches = [batch(tokens) for _ in range(count)]
    torch.cuda.reset_peak_memory_stats()
    for inputs in batches:
        outputs = model(**inputs, use_cache=False)
        loss = outputs.loss / count
        loss.backward()
        loss.item()
        if inputs is not batches[-1]:
            del outputs, loss
    optimizer.step()
    return [torch.cuda.max_memory_allocated() / GIB, sum(it.numel() for it in trained)]


def trained_by_deepspeed(row: Row, model: torch.nn.Module) -> list[float]:
    """Train one step with ZeRO; return the peak in GiB and the number of trained parameters."""
    import deepspeed
    import torch

    model.to("cuda")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = sum(parameter.numel() for parameter in trained)
    count, tokens = int(row["accumulated"]), int(row["tokens"])
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": int(row["zero"]),
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "overlap_comm": False,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 100_000,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=False)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, dist_init_required=False
    )
    batches = [batch(tokens) for _ in range(count)]
    torch.cuda.reset_peak_memory_stats()
    for inputs in batches:
        outputs = engine(**inputs, use_cache=False)
        loss = outputs.loss
        loss.item()
        engine.backward(loss)
        engine.step()
        del outputs, loss
    return [torch.cuda.max_memory_allocated() / GIB, numbers]


def batch(tokens: int) -> dict[str, torch.Tensor]:
    """Return one sequence; the first half of its labels is masked."""
    import torch

    ids = torch.randint(100, VOCABULARY, (1, tokens))
    labels = ids.clone()
    labels[:, : tokens // 2] = -100
    positions = torch.arange(tokens).expand(3, 1, tokens).contiguous()
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: tensor.to("cuda") for name, tensor in inputs.items()}


def use_nf4(model: torch.nn.Module, *, nested: bool) -> None:
    """Replace all linear layers except the last by layers with 4-bit weights and adapters."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Nf4Product(torch.autograd.Function):
        """A product with a frozen weight, which each pass decodes again."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: Nf4Linear) -> torch.Tensor:  # noqa: ANN401 - PyTorch's
            ctx.layer = layer
            return functional.linear(x, layer.weight())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401 - PyTorch's
            return grad.matmul(ctx.layer.weight()), None

    class Nf4Linear(nn.Module):
        """A frozen linear layer in NF4, with an adapter of rank 8 in float32."""

        def __init__(self, width: int, height: int) -> None:
            super().__init__()
            self.shape = height, width
            count = height * width // BLOCK

            def keep(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> None:
                self.register_buffer(name, torch.zeros(shape, dtype=dtype))

            keep("codes", height * width // 2, dtype=torch.uint8)
            keep("scales", count, dtype=torch.uint8 if nested else torch.float32)
            keep("pairs", 256, 2, dtype=torch.bfloat16)  # the values of a byte's two codes
            if nested:
                keep("of_scales", -(-count // SCALES))
                keep("offset")
                keep("map", 256, 1)
            self.down = nn.Parameter(torch.empty(RANK, width))
            self.up = nn.Parameter(torch.empty(height, RANK))

        def scale(self) -> torch.Tensor:
            if not nested:
                return self.scales
            found = functional.embedding(self.scales.int(), self.map).reshape(-1)
            each = self.of_scales.repeat_interleave(SCALES)[: self.scales.numel()]
            return found.mul_(each).add_(self.offset)

        def weight(self) -> torch.Tensor:
            scale = self.scale().bfloat16()
            index = self.codes.int()
            values = functional.embedding(index, self.pairs)
            del index
            return (values.view(-1, BLOCK) * scale.unsqueeze(1)).view(self.shape)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = functional.linear(x.float(), self.down)
            more = functional.linear(low, self.up) * (ALPHA / RANK)
            return Nf4Product.apply(x, self) + more.to(x.dtype)

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    last = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not last:
            parent, _, attribute = name.rpartition(".")
            new = Nf4Linear(layer.in_features, layer.out_features)
            setattr(model.get_submodule(parent), attribute, new)


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    ours: dict[str, list[float]] = {}
    theirs: list[float] = []
    inside = 0
    for row in answers.rows:
        peak, trained = answers.figures[""][row["row"]]
        assert row["ranks"] != "1" or trained == int(row["parameters"]), (row["row"], trained)
        real = float(row["gib"])
        error = 100 * (peak / real - 1)
        rounded = abs(peak - real) <= DIGIT
        inside += rounded
        ours.setdefault(looked(row), []).append(error)
        if row["their_error"]:
            theirs.append(float(row["their_error"]))
        cells = [row["row"], row["card"], row["gib"], f"{peak:.4f}", f"{error:+.3f}"]
        cells += ["yes" if rounded else "", row["their_error"], unseen(row)]
        lines.append([*cells, f"{answers.torch(row)} as {card(row).name}"])
    heads = ["one step of fine-tuning", "GPU", "real GiB", "virtual", "%", "within its last digit"]
    heads += ["FakeGPU's %", "never looked at", "torch and card here"]
    text = ["Peak allocated in GiB by one step of AdamW, by its source to three digits", line()]
    text += [f"here: {it}" for it in dict.fromkeys(answers.versions.values())]
    text += ["", table(lines, heads), ""]
    text += [f"{name}: {len(it)} rows, {spread(it, 3, 3)}" for name, it in sorted(ours.items())]
    text.append(f"FakeGPU's static estimates: {spread(theirs, 3, 3)}")
    text.append(f"{inside} of {len(lines)} are within the rounding of their last digit")
    return "\n".join(text)
