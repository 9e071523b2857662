"""Regressions of torch and of libraries of other networks; regressions.toml says of which.

Releases are old, and import what they need in their own way: each test imports its library itself.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.gpu_memory(card="A100-80GB")]

# -- torch --


def test_bfloat16_conv3d():
    convolution = torch.nn.Conv3d(64, 64, 3, padding=1).cuda().bfloat16()
    with torch.no_grad():
        convolution(torch.randn(1, 64, 17, 256, 256, device="cuda", dtype=torch.bfloat16))


def test_growing_batches():
    for number in range(1, 9):
        batch = torch.empty(number * 17 << 20, dtype=torch.uint8, device="cuda")
        del batch


def multiply(values, weight):
    """Multiply in int8, and return bfloat16, as OneTrainer's linear layers do."""
    scale = values.abs().amax(dim=-1, keepdim=True).div(127)
    rounded = values.float().div(scale).round().clamp(-128, 127).to(torch.int8)
    return torch._int_mm(rounded, weight).float().mul_(scale).to(torch.bfloat16)


class Int8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, weight):
        ctx.save_for_backward(weight)
        return multiply(values, weight.T)

    @staticmethod
    def backward(ctx, grad):
        return multiply(grad, ctx.saved_tensors[0]), None


class Int8Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("up", torch.zeros(4 * width, width, dtype=torch.int8))
        self.register_buffer("down", torch.zeros(width, 4 * width, dtype=torch.int8))

    def step(self, values):
        return values + Int8.apply(torch.nn.functional.gelu(Int8.apply(values, self.up)), self.down)

    def forward(self, values):
        return checkpoint(self.step, values, use_reentrant=False)


def test_checkpointed_int8_blocks():
    width, number = 1024, 2048
    blocks = torch.nn.Sequential(*(Int8Block(width) for _ in range(16))).cuda()
    for block in blocks:
        block.compile(fullgraph=True)
    values = torch.randn(number, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        blocks(values).sum().backward()


# -- FSDP of torch: nothing grew --


class Block(torch.nn.Module):
    """A Llama layer, or only its second half."""

    def __init__(self, heads=0, width=1024):
        super().__init__()
        self.heads = heads
        for name in "qkvo" if heads else "":
            setattr(self, name, torch.nn.Linear(width, width, bias=False))
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)
        if heads:
            self.norm = torch.nn.LayerNorm(width)

    def forward(self, x):
        if self.heads:
            y = self.norm(x)
            heads = [
                it(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for it in (self.q, self.k, self.v)
            ]
            y = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def blocks_of(heads):
    return torch.nn.Sequential(*(Block(heads) for _ in range(8))).cuda()


def blocks_in_2d():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "tensor"))
    model = blocks_of(0)
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    for block in model:
        parallel.parallelize_module(block, mesh["tensor"], plan)
    return model, mesh["data"]


def train(model, batch):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(batch, 1024, 1024, device="cuda")).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp1(model, **more):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=0,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
        **more,
    )


def fsdp2(model, **more):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for block in model:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), **more)
    return fully_shard(model, **more)


@pytest.mark.gpu_memory(card="B200", world_size=8)
@pytest.mark.parametrize("shard", [fsdp2, fsdp1])
def test_fsdp(shard):
    train(shard(blocks_of(16)), 4)


@pytest.mark.gpu_memory(card="H100", world_size=8)
def test_fsdp1_in_2d():
    model, mesh = blocks_in_2d()
    train(fsdp1(model, device_mesh=mesh, use_orig_params=True), 8)


@pytest.mark.gpu_memory(card="H100", world_size=8)
def test_fsdp2_in_2d():
    model, mesh = blocks_in_2d()
    train(fsdp2(model, mesh=mesh), 8)


# -- DeepSpeed --


class Checkpointed(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(16))

    def forward(self, values):
        for layer in self.layers:
            values = checkpoint(layer, values, use_reentrant=False)
        return values


@pytest.mark.gpu_memory(card="A100-80GB", world_size=4)
def test_checkpointed_layers_with_stage_3():
    import deepspeed

    width = 2048
    model = Checkpointed(width)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": width * width,
            "stage3_max_reuse_distance": 0,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for _ in range(2):
        batch = torch.randn(4, width, device=engine.device, dtype=torch.bfloat16)
        batch.requires_grad_()
        engine.backward(engine(batch).float().pow(2).mean())
        engine.step()


# -- networks of images and sounds --


def test_sliced_attention():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=96,
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=8,
    )
    model.set_attention_slice("auto")  # else attention is PyTorch's own
    model = model.cuda().half().eval()
    noise = torch.randn(1, 4, 96, 96, device="cuda", dtype=torch.float16)
    text = torch.randn(1, 77, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        model(noise, 10, text)


def test_decoding_of_nine_frames():
    from diffusers import AutoencoderKLCogVideoX

    model = AutoencoderKLCogVideoX(
        block_out_channels=(32, 64, 64, 128), layers_per_block=1, norm_num_groups=8
    )
    decoder = model.to(dtype=torch.bfloat16).eval().cuda()
    with torch.no_grad():
        decoder.decode(torch.randn(1, 16, 9, 30, 45, device="cuda", dtype=torch.bfloat16))


def test_denoising_unet():
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    model = Unet(dim=32, dim_mults=(1, 2, 4, 8), channels=2)
    diffusion = GaussianDiffusion(model, image_size=128, timesteps=100, loss_type="l1").cuda()
    diffusion(torch.rand(2, 2, 128, 128, device="cuda")).backward()


@pytest.mark.gpu_memory(card="A100-40GB")
def test_f5_tts():
    from f5_tts.model.backbones.unett import UNetT
    from f5_tts.model.cfm import CFM

    backbone = UNetT(
        dim=768, depth=4, heads=12, ff_mult=4, text_num_embeds=256, mel_dim=100, pe_attn_head=1
    )
    model = CFM(transformer=backbone, mel_spec_kwargs={"n_mel_channels": 100}).cuda()
    mel = torch.randn(16, 1200, 100, device="cuda")
    text = torch.randint(0, 256, (16, 120), device="cuda")
    lengths = torch.full((16,), 1200, device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss, _, _ = model(mel, text=text, lens=lengths)
    loss.backward()


def test_mask2former_inference():
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    backbone = SwinConfig(
        image_size=384,
        embed_dim=32,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 4, 8],
        window_size=12,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(backbone_config=backbone, encoder_layers=1, decoder_layers=3)
    model = Mask2FormerForUniversalSegmentation(config).cuda().eval()
    with torch.no_grad():
        model(torch.rand(1, 3, 384, 384, device="cuda"))


@pytest.mark.gpu_memory(card="A100-80GB", values="off")
def test_task_aligned_assigner():
    from ultralytics.utils.tal import TaskAlignedAssigner

    images, anchors, boxes, classes = 32, 8400, 200, 80
    assigner = TaskAlignedAssigner(topk=10, num_classes=classes, alpha=0.5, beta=6.0)
    with torch.no_grad():
        assigner(
            torch.rand(images, anchors, classes, device="cuda"),
            torch.rand(images, anchors, 4, device="cuda"),
            torch.rand(anchors, 2, device="cuda"),
            torch.zeros(images, boxes, 1, dtype=torch.long, device="cuda"),
            torch.rand(images, boxes, 4, device="cuda"),
            torch.ones(images, boxes, 1, dtype=torch.bool, device="cuda"),
        )


def test_vector_quantize():
    from vector_quantize_pytorch import GroupedResidualVQ

    encoder = torch.nn.Linear(64, 256).cuda()
    quantizer = GroupedResidualVQ(dim=256, num_quantizers=4, codebook_size=512, groups=2).cuda()
    for _ in range(8):
        quantized, _, loss = quantizer(encoder(torch.randn(4, 1024, 64, device="cuda")))
        (quantized.mean() + loss.sum()).backward()


# -- a metric, and a Gaussian process --


def test_average_precision_of_pixels():
    try:
        from torchmetrics.classification import BinaryAveragePrecision
    except ImportError:
        from torchmetrics import BinnedAveragePrecision

        metric = BinnedAveragePrecision(num_classes=1, thresholds=200).cuda()
    else:
        metric = BinaryAveragePrecision(thresholds=200).cuda()
    with torch.no_grad():
        metric.update(
            torch.rand(128 * 1024, device="cuda"),
            torch.randint(0, 2, (128 * 1024,), device="cuda"),
        )


def test_mean_of_8000_points():
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, inputs, targets, likelihood):
            super().__init__(inputs, targets, likelihood)
            self.mean = gpytorch.means.ZeroMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, inputs):
            return gpytorch.distributions.MultivariateNormal(
                self.mean(inputs), self.covariance(inputs)
            )

    likelihood = gpytorch.likelihoods.GaussianLikelihood().cuda()
    inputs = torch.randn(3, 818, 16, device="cuda")
    model = Model(inputs, torch.randn(3, 818, device="cuda"), likelihood).cuda().eval()
    likelihood.eval()
    with torch.no_grad(), gpytorch.settings.skip_posterior_variances(state=True):
        mean = model(torch.randn(3, 8000, 16, device="cuda")).mean
    assert mean.shape == (3, 8000)
