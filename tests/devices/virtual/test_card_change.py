"""Figures of a test do not depend on the card of the test before it."""

STEPS = """
import torch.nn.functional as F

def numbers(*shape, **options):
    return torch.randn(*shape, device="cuda", requires_grad=True, **options)

def integers(*shape):
    return torch.randint(3000, shape, device="cuda")

def attention(dtype, mask=False):
    query, key, value = (numbers(2, 8, 1024, 64, dtype=dtype) for _ in range(3))
    mask = numbers(1024, 1024, dtype=dtype) if mask else None
    F.scaled_dot_product_attention(query, key, value, mask).sum().backward()

def convolution(dtype):
    images, weights = numbers(8, 64, 56, 56, dtype=dtype), numbers(64, 64, 3, 3, dtype=dtype)
    F.conv2d(images, weights).sum().backward()

STEPS = {
    "sort": lambda: numbers(3_000_001).sort(),
    "sort of integers": lambda: integers(3_000_001).sort(),
    "nonzero": lambda: (numbers(3_000_001) > 0).nonzero(),
    "unique": lambda: integers(3_000_001).unique(return_inverse=True),
    "cumulative": lambda: numbers(3_000_001).cumsum(0),
    "embedding": lambda: F.embedding(integers(64, 512), numbers(3000, 64)).sum().backward(),
    "randperm": lambda: torch.randperm(3_000_001, device="cuda"),
    "coalesce": lambda: torch.sparse_coo_tensor(integers(1, 500_000), numbers(500_000)).coalesce(),
    "float attention": lambda: attention(torch.float),
    "half attention": lambda: attention(torch.half),
    "masked attention": lambda: attention(torch.half, mask=True),
    "convolution": lambda: convolution(torch.float),
    "half convolution": lambda: convolution(torch.half),
    "product": lambda: numbers(1111, 512).matmul(numbers(512, 777)).sum().backward(),
    "recurrent": lambda: torch.nn.LSTM(64, 64).cuda()(numbers(50, 32, 64))[0].sum().backward(),
}

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.gpu_memory(card={cards})
def test_it(name, gpu_memory):
    STEPS[name]()
    print("\\n=", gpu_memory.card, name, gpu_memory.peak_allocated)
"""


def peaks(session):
    """Return the lines of a session that have a peak."""
    lines = [line for line in session.out.splitlines() if line.startswith("= ")]
    assert session.outcomes == {"passed": len(lines)}, session.out
    return sorted(lines)


def test_each_card_has_the_figures_of_a_process_of_its_own(suite):
    alone = [
        line
        for card in ("T4", "H100")
        for line in peaks(suite.run_warm("-s", source=STEPS.replace("{cards}", repr([card]))))
    ]
    both = suite.run("-s", source=STEPS.replace("{cards}", "['T4', 'H100']"))
    assert peaks(both) == sorted(alone)
