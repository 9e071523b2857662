import gc
import os
import sys

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)


def tell(title, text):
    line = f"{title}: rank {rank} {torch.cuda.get_device_name()} {text}"
    os.write(1, line.encode() + bytes([10]))


def ddp(network):
    return torch.nn.parallel.DistributedDataParallel(network, init_sync=False)


def train(title, wrap):
    network = torch.nn.Linear(1024, 1024, bias=False).cuda()
    model = wrap(network)
    for _ in range(2):
        model(torch.zeros(8, 1024, device="cuda")).sum().backward()
    other = torch.cuda.memory_allocated(1 - rank)
    mib = torch.cuda.memory_allocated() >> 20
    tell(title, f"{wrap.__name__} holds {mib} MiB, elsewhere {other}")


def stages():
    told = [None, None]
    if rank == 0:
        distributed.send_object_list(["first", {"rows": 8}], dst=1)
        distributed.recv_object_list(told, src=1)
    else:
        distributed.recv_object_list(told, src=0)
        distributed.send_object_list([told[1], "back"], dst=0)
    network = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).cuda()
    stage = PipelineStage(network, rank, 2, torch.device("cuda", rank))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    batch, losses = torch.ones(64, 256, device="cuda"), []
    for _ in range(2):
        schedule.step(batch) if rank == 0 else schedule.step(target=batch, losses=losses)
    tell("pipeline", f"{told} {len(losses)} losses")


if sys.argv[1] == "nccl":
    distributed.init_process_group("nccl")
    train("NCCL", fully_shard)
    gc.collect()
    stages()
else:
    distributed.init_process_group("cpu:gloo,cuda:nccl")  # the processes really talk
    told = [None, None]
    distributed.all_gather_object(told, rank * 10)
    tell("gathered", told)
    for wrap in (ddp, fully_shard):
        train("Gloo", wrap)
        gc.collect()
distributed.destroy_process_group()
