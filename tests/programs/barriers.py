import os
import sys

import torch
from torch import distributed

backend, *device = sys.argv[1].split()
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
options = {"device_id": torch.device("cuda", local)} if device else {}
distributed.init_process_group(None if backend == "None" else backend, **options)
everyone = range(distributed.get_world_size())
kinds = None, "nccl", "gloo", "cpu:gloo,cuda:nccl"
held = []
for group in [None, *(distributed.new_group([*everyone], backend=kind) for kind in kinds)]:
    distributed.barrier(group)
    held.append(torch.cuda.memory_allocated())
line = f"rank {distributed.get_rank()} holds {held}\n"
os.write(1, line.encode())
distributed.destroy_process_group()
