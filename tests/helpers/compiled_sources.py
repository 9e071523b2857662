"""Sources of programs that tests compile in processes of their own."""

OPTIMIZER_OF_8_BITS = """
@torch.compile(fullgraph=True)
def adam8(p, grad, codes, scale):
    "An optimizer's state in 8 bits, as torchao's has it: kernels write into their arguments."
    state = codes.float().view(-1, 256) * scale.view(-1, 1)
    state = state.lerp(grad.view(-1, 256), 0.1)
    scale.copy_(state.abs().amax(-1) / 127)
    codes.copy_((state / scale.view(-1, 1)).round().to(torch.int8).view(codes.shape))
    p.add_(state.view(p.shape), alpha=-0.1)


def optimizer_of_8_bits(width):
    p, grad = torch.zeros(2, width, width, device="cuda")
    codes = torch.zeros(width, width, dtype=torch.int8, device="cuda")
    scale = torch.ones(width * width // 256, device="cuda")
    for _ in range(2):
        adam8(p, grad, codes, scale)
"""
"""``optimizer_of_8_bits`` runs two steps on a square parameter, with kernels that Triton tunes."""
