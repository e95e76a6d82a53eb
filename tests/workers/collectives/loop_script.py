"""A training loop without Trainer; `--case` names what depends on the rank."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--case", default="none")
options = parser.parse_args()
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 4))
batches = 3 if options.case == "uneven" and rank == 1 else 4
for _ in range(batches):
    model(torch.ones(2, 4)).sum().backward()
scores = torch.ones(3 if options.case == "size" and rank == 1 else 4)
dist.all_reduce(scores)
dist.barrier()
dist.destroy_process_group()
