"""Steps under DDP or FSDP2 in forked ranks, some of which are slow; each rank returns what its monitor found."""

import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from workers.health import Ranks, gloo

from hfscale.health.local_time import LocalTimer
from hfscale.health.monitor import Monitor, gather_hosts

WORK_S = 0.03
EVERY = 10


class TimedLayer(nn.Module):
    """A layer that takes `seconds` even on a busy machine, since a sleep needs no core."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.seconds = WORK_S

    def forward(self, x):
        time.sleep(self.seconds)
        return self.layer(x)


def trained(rank_store, rank, ratio, guilty, steps, drift, strategy):
    """Rank `guilty` takes `ratio` times as long (`rotating`: each rank in turn) and changes a weight at `drift`."""
    gloo(rank_store)
    torch.manual_seed(0)
    work = TimedLayer()
    if strategy == "ddp":
        model = DistributedDataParallel(work)
    else:
        fully_shard(work)
        model = fully_shard(nn.Sequential(work, nn.Linear(16, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hosts = gather_hosts()
    timer = LocalTimer(model, strategy, torch.device("cpu"))
    replicas = list(model.parameters()) if strategy == "ddp" else ()
    monitor = Monitor(hosts=hosts, timer=timer, replicas=replicas, checksum_every=20)
    found, skews = [], []
    for step in range(1, steps + 1):
        if guilty == "data" and rank == 1:
            time.sleep(0.01)
        monitor.batch_arrived()
        monitor.step_began()
        is_slow = rank == (step % rank_store.world_size if guilty == "rotating" else guilty)
        work.seconds = WORK_S * (ratio if is_slow else 1.0)
        optimizer.zero_grad()
        model(torch.full((2, 16), float(rank))).sum().backward()
        optimizer.step()
        if step == drift and rank == guilty:
            with torch.no_grad():
                work.layer.weight[0, 0] += 1e-3
        monitor.step_ended()
        if step % EVERY == 0:
            keys, new, _ = monitor.exchange(step, None, None)
            skews.append(keys.get("scaling/straggler_skew"))
            found += [(step, finding.check, finding.ranks, finding.message) for finding in new]
    monitor.stop()
    return {"found": found, "skews": skews, "hosts": hosts}


def run(world_size, ratio, guilty, steps=60, drift=None, strategy="ddp"):
    return Ranks(world_size, trained, ratio, guilty, steps, drift, strategy).finish(60)
