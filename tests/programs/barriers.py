import os
import sys

import torch
from torch import distributed

rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
launch = os.environ.get("TORCHELASTIC_RUN_ID", "alone")
torch.cuda.set_device(local)
kinds = None, "nccl", "gloo", "cpu:gloo,cuda:nccl"
for number, name in enumerate(sys.argv[1:]):
    backend, *device = name.split()
    distributed.init_process_group(
        None if backend == "None" else backend,
        # In one store, gloo would find the ranks of the group before: both have the same name.
        init_method=f"file://{__file__}.{launch}.{number}",
        rank=rank,
        world_size=size,
        **({"device_id": torch.device("cuda", local)} if device else {}),
    )
    held = []
    for group in [None, *(distributed.new_group([*range(size)], backend=kind) for kind in kinds)]:
        distributed.barrier(group)
        held.append(torch.cuda.memory_allocated())
    line = f"rank {distributed.get_rank()} of {name} holds {held}\n"
    os.write(1, line.encode())
    distributed.destroy_process_group()
