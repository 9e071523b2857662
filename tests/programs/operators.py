"""Calls operators whose kernels CUB chooses by the GPU's architecture, or that read back.

Prints a line for each: its name, its result, and the bytes that it took.
"""

import torch

numbers = torch.tensor([3, 1, 2, 3, 0, 1] * 43, dtype=torch.int32, device="cuda")
floats = numbers.float()
rows = floats[:256].reshape(16, 16)
mask = numbers > 1
places = numbers[:5].long()
OPERATORS = {
    "argsort": lambda: numbers.argsort(stable=True)[:5],
    "bincount": lambda: torch.bincount(numbers),
    "cummax": lambda: floats.cummax(0).indices[-1],
    "cumprod": lambda: numbers[:4].cumprod(0),
    "cumsum": lambda: numbers.cumsum(0)[-1],
    "histc": lambda: torch.histc(floats, 4),
    "index_put accumulate": lambda: rows.clone().index_put((places,), rows[:5], accumulate=True)[0],
    "kthvalue": lambda: floats.kthvalue(7).values,
    "logcumsumexp": lambda: floats[:3].logcumsumexp(0),
    "masked_scatter": lambda: floats.masked_scatter(mask, floats)[:5],
    "masked_select": lambda: numbers.masked_select(mask).shape,
    "median": floats.median,
    "mode": lambda: numbers.mode().values,
    "multinomial": lambda: torch.multinomial(rows[:2], 3).shape,
    "nonzero": lambda: numbers.nonzero().shape,
    "prod": numbers[:4].prod,
    "randperm": lambda: torch.randperm(300, device="cuda").sort().values[-1],
    "repeat_interleave": lambda: numbers[:3].repeat_interleave(places[:3]).tolist(),
    "scatter_add": lambda: torch.zeros(4, device="cuda").scatter_add(0, places, floats),
    "searchsorted": lambda: torch.searchsorted(floats[:3].sort().values, floats[3:6]),
    "sort": lambda: numbers.sort().values[-1],
    "topk": lambda: floats.topk(3).values,
    "unique": numbers.unique,
    "unique_consecutive": lambda: numbers.unique_consecutive().shape,
    "where": lambda: torch.where(mask)[0].shape,
    # the last one: a thread of autograd's frees memory when it likes
    "embedding backward": lambda: torch.autograd.grad(
        torch.nn.functional.embedding(places, weight := rows.clone().requires_grad_()).sum(), weight
    )[0].sum(1),
}
for name, call in OPERATORS.items():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    values = result.tolist() if isinstance(result, torch.Tensor) else list(result)
    print(name, values, torch.cuda.max_memory_allocated() - before, sep=": ")
