"""Steps of FLUX.2-klein with PEFT's methods, measured on an L40S, beside the virtual GPU's.

    python -m benchmarks.published diffusion --source peft --python PYTHON

The source is a clone of huggingface/peft: each row uses the library and the method's configuration
at the row's commit. The interpreter needs the torch of most rows, 2.12, with diffusers 0.38.0 and
transformers 5.10.2. As in the source, the text encoder and the image encoder fill the card first,
and are deleted.

The source's allocated memory is the mean after each of the first hundred steps. Each step keeps 512
bytes, its loss, so the mean can be computed from ten steps. Its reserved memory is the maximum of
all 750 steps: the cache is emptied after each hundred steps, and here after six.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.harness import line, read, spreads, table
from benchmarks.published.runner import looked, unseen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from benchmarks.published.runner import Answers, Process, Row

CARD = "L40S"
FOLDER = "method_comparison/image-gen"
IMAGES, BATCH, SIZE, TOKENS = 14, 2, 512, 512
FIRST, SECOND = 6, 4
"""number of steps before the cache is emptied, and after"""
STEPS = 100
"""number of steps in the source before the cache is emptied"""
LOSS = 512
"""bytes that each step keeps"""
SECONDS = 400
"""time limit of a row: two methods begin with decompositions on the CPU"""
TRANSFORMER = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": False,
}
TEXT_ENCODER = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
LAYERS = (10, 20, 30)
"""layers of the text encoder whose outputs the transformer reads"""
TITLE = "FLUX.2-klein 4B with PEFT's methods, 512x512, batch 2, bfloat16, on an L40S; bytes"


@dataclass
class Prepared:
    """The inputs of the steps."""

    indices: torch.Tensor
    latents: torch.Tensor
    prompts: torch.Tensor
    text_ids: torch.Tensor
    generator: torch.Generator


@dataclass
class Trace:
    """What a run kept and took after each step, and its most."""

    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    most: int = 0


def rows() -> list[Row]:
    """Return the rows, in the order of the source's folder."""
    return read("diffusion-peaks.csv")


def folders(_row: Row) -> list[str]:
    """Return the folders of the library and of the experiments."""
    return ["src", FOLDER]


def step(row: Row, process: Process) -> dict[str, list[float]]:
    """Run a row; return bytes allocated and reserved, and those reserved at the ends of a range."""
    import torch

    device = process.device
    torch.cuda.init()
    device.values.compute("auto")
    sys.path.insert(0, str(process.source / "src"))
    torch.nn.Linear(1, 1).to("cuda")  # the source does not count the memory reserved by this
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.max_memory_reserved()
    experiment = process.source / FOLDER / "experiments" / row["experiment"]
    transformer = model(experiment)
    generator = torch.Generator(device="cuda").manual_seed(0)
    orders = [torch.randperm(IMAGES, generator=generator, device="cuda") for _ in range(1000)]
    indices = torch.cat(orders)
    del orders
    judge = image_judge()
    transformer.to("cuda")
    check(row, transformer)
    optimizer = torch.optim.AdamW(transformer.parameters(), **settings(experiment))
    prompts, text_ids = encoded_prompts()
    latents = encoded_images()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    prepared = Prepared(indices, latents, prompts, text_ids, generator)
    adapts = row["experiment"].startswith("adalora")
    trace = train(transformer, optimizer, prepared, adapts=adapts)
    ends = []
    if device.alternatives().reason:
        for end in ("least", "most"):
            device.gpu_choices.assume_sizes(end)
            run = train(transformer, optimizer, prepared, adapts=adapts)
            ends.append(run.most - start)
    del judge
    first = trace.allocated[:FIRST]
    steady = sum(first) / FIRST - LOSS * (FIRST - 1) / 2
    figures = [steady + LOSS * (STEPS - 1) / 2, trace.most]
    return {"figures": [figure - start for figure in figures], "ends": ends}


def settings(experiment: Path) -> dict[str, float]:
    """Return AdamW's settings: the experiment's own, or the default ones."""
    default = experiment.parents[2] / "default_training_params.json"
    found = {}
    for path in (default, experiment / "training_params.json"):
        if path.exists():
            found |= json.loads(path.read_text(encoding="utf-8"))
    return found["optimizer_kwargs"]


def check(row: Row, transformer: torch.nn.Module) -> None:
    """Check the model's numbers of parameters against the source's."""
    parameters = list(transformer.parameters())
    counts = (
        sum(it.numel() for it in parameters if it.requires_grad),
        sum(it.numel() for it in parameters),
    )
    published = int(row["trainable"]), int(row["parameters"])
    if counts != published:
        raise SystemExit(f"{counts} parameters, not {published}: another model")


@contextmanager
def unset() -> Iterator[None]:
    """Create modules in bfloat16 without initializing parameters: their pages are never touched."""
    import torch
    from torch.nn import init

    names = [name for name in dir(init) if name.endswith("_") and not name.startswith("_")]
    kept = {name: getattr(init, name) for name in names}
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    for name in names:
        setattr(init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)
        for name, function in kept.items():
            setattr(init, name, function)


def model(experiment: Path) -> torch.nn.Module:
    """Return the transformer on the CPU, with a method's adapter or for full training."""
    from diffusers import Flux2Transformer2DModel
    from peft import PeftConfig, get_peft_model

    with unset():
        transformer = Flux2Transformer2DModel(**TRANSFORMER)
    transformer.enable_gradient_checkpointing()
    if (experiment / "adapter_config.json").exists():
        adapter = PeftConfig.from_pretrained(str(experiment))
        transformer = get_peft_model(transformer, adapter, autocast_adapter_dtype=True)
    else:
        transformer.requires_grad_(requires_grad=True)
    return transformer.train()


def image_judge() -> torch.nn.Module:
    """Return the model that judges images between the steps: facebook/dinov2-base, in float32."""
    import torch
    from transformers import Dinov2Config, Dinov2Model

    with torch.device("meta"):
        judge = Dinov2Model(Dinov2Config(image_size=518))
    return judge.to_empty(device="cuda").eval()


def encoded_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Encode the prompts, padded to the same length; the encoder is deleted afterwards."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        encoder = Qwen3ForCausalLM(Qwen3Config(**TEXT_ENCODER)).to(torch.bfloat16).eval()
    encoder.requires_grad_(requires_grad=False)
    outputs, ids = [], []
    with torch.no_grad():
        encoder.model.to_empty(device="cuda")
        encoder.lm_head.weight = encoder.model.embed_tokens.weight
        for _ in range(IMAGES):
            outputs.append(encoded_prompt(encoder))
            ids.append(torch.zeros(1, TOKENS, 4, dtype=torch.long).to("cuda"))
        encoder.lm_head.weight = None
        encoder.model.to_empty(device="meta")
    return torch.cat(outputs), torch.cat(ids)


def encoded_prompt(encoder: torch.nn.Module) -> torch.Tensor:
    """Encode one prompt of two dozen tokens."""
    import torch

    tokens = torch.zeros(1, TOKENS, dtype=torch.long).to("cuda")
    mask = (torch.arange(TOKENS) < 24).long()[None].to("cuda")
    output = encoder(
        input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False
    )
    states = torch.stack([output.hidden_states[at] for at in LAYERS], dim=1)
    count, layers, length, width = states.shape
    return states.permute(0, 2, 1, 3).reshape(count, length, layers * width).repeat(1, 1, 1)


def encoded_images() -> torch.Tensor:
    """Encode the images, two at a time; the encoder is deleted afterwards."""
    import torch
    from diffusers import AutoencoderKLFlux2

    with torch.device("meta"):
        vae = AutoencoderKLFlux2().to(torch.bfloat16).eval()
    vae.requires_grad_(requires_grad=False)
    encoded = []
    with torch.no_grad():
        vae.to_empty(device="cuda")
        shape = (1, TRANSFORMER["in_channels"], 1, 1)
        mean = torch.zeros(shape, dtype=torch.bfloat16).to("cuda")
        deviation = torch.ones(shape, dtype=torch.bfloat16).to("cuda")
        for _ in range(IMAGES // BATCH):
            images = torch.zeros(BATCH, 3, SIZE, SIZE).to(device="cuda", dtype=torch.bfloat16)
            latents = vae.encode(images).latent_dist.mode()
            count, channels, height, width = latents.shape
            latents = latents.view(count, channels, height // 2, 2, width // 2, 2)
            latents = latents.permute(0, 1, 3, 5, 2, 4)
            latents = latents.reshape(count, channels * 4, height // 2, width // 2)
            encoded.append((latents - mean) / deviation)
        vae.to_empty(device="meta")
    return torch.cat(encoded)


def train(
    transformer: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    prepared: Prepared,
    *,
    adapts: bool,
) -> Trace:
    """Run the steps; variables stay alive until the next step, as in the source's loop."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline

    scheduler, losses, trace = FlowMatchEulerDiscreteScheduler(), [], Trace()
    for step in range(FIRST + SECOND):
        batch = prepared.indices[BATCH * step : BATCH * (step + 1)].to("cuda", dtype=torch.long)
        latents = prepared.latents.index_select(0, batch)
        prompts = prepared.prompts.index_select(0, batch)
        text_ids = prepared.text_ids.index_select(0, batch)
        image_ids = Flux2KleinPipeline._prepare_latent_ids(latents).to("cuda")
        noise = torch.randn(
            latents.shape, generator=prepared.generator, device="cuda", dtype=latents.dtype
        )
        chosen = (torch.rand(BATCH) * 1000).long()
        timesteps = scheduler.timesteps[chosen].to("cuda")
        sigmas = scheduler.sigmas[chosen].to(torch.bfloat16).view(-1, 1, 1, 1).to("cuda")
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        packed = Flux2KleinPipeline._pack_latents(noisy)
        optimizer.zero_grad(set_to_none=True)
        predicted = transformer(
            hidden_states=packed,
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=prompts,
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        predicted = predicted[:, : packed.size(1)]
        predicted = Flux2KleinPipeline._unpack_latents_with_ids(predicted, image_ids)
        weights = torch.ones_like(sigmas)
        target = noise - latents
        squares = weights.float() * (predicted.float() - target.float()) ** 2
        loss = torch.mean(squares.reshape(BATCH, -1), 1)
        del squares  # in the source it has no variable
        loss = loss.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        if adapts:
            transformer.base_model.update_and_allocate(step + 1)
        losses.append(loss)
        trace.allocated.append(torch.cuda.memory_allocated())
        trace.reserved.append(torch.cuda.memory_reserved())
        if step + 1 in (FIRST, FIRST + SECOND):
            trace.most = max(trace.most, torch.cuda.max_memory_reserved())
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return trace


def report(answers: Answers) -> str:
    """Return the table and its summaries."""
    lines: list[list[str]] = []
    groups: dict[str, list[float]] = {}
    late = [row["experiment"] for row in answers.rows if row["row"] in answers.without]
    for row in answers.answered:
        figures, ends = answers.figures[""][row["row"]].values()
        real = float(row["allocated_mean"]), float(row["reserved_max"])
        errors = [100 * (mine / theirs - 1) for mine, theirs in zip(figures, real, strict=True)]
        for kind, error in zip(("allocated", "reserved"), errors, strict=True):
            groups.setdefault(f"{looked(row)}, {kind}", []).append(error)
        name = row["row"].removeprefix("FLUX.2-klein 4B ").removesuffix(" 512 x2 bfloat16")
        cells = [name, row["torch"], f"{real[0]:,.1f}", f"{figures[0]:,.1f}", f"{errors[0]:+.4f}"]
        cells += [f"{real[1]:,.0f}", f"{figures[1]:,.0f}", f"{errors[1]:+.2f}"]
        reserved = [figures[1], *ends]
        low, high = min(reserved), max(reserved)
        lines.append([*cells, f"{low:,.0f} to {high:,.0f}" if low < high else "", unseen(row)])
    heads = ["method", "torch", "allocated", "virtual", "allocated %", "reserved", "virtual"]
    heads += ["reserved %", "reserved between", "never looked at"]
    here = answers.here().partition("+")[0].partition(",")[0]
    text = [TITLE, line(), here, "", table(lines, heads), "", *spreads(groups, 4)]
    if late:
        text.append(f"not run, or without an end within {SECONDS} s: {', '.join(late)}")
    return "\n".join(text)
