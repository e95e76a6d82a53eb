"""Steps under DDP or FSDP2 in forked ranks, some of which are slow; each rank returns what its monitor found."""

import time

import torch
from strategy_kinds import named
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerState
from workers.health import Ranks, gloo

from hfscale.health.local_time import LocalTimer
from hfscale.health.monitor import Monitor, gather_hosts
from hfscale.trainer.collector import LogCollector

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


class Compared:
    """Keeps what the monitor finds at each log."""

    def __init__(self, monitor):
        self.monitor = monitor
        self.found = []
        self.skews = []

    def numbers(self, state, logs, seconds):
        return self.monitor.numbers(state.global_step, None, None, seconds)

    def judge(self, columns, state):
        return self.monitor.judge(state.global_step, columns)

    def keys(self, judgement, state, logs):
        comparison = self.monitor.comparison(judgement)
        self.skews.append(comparison.keys.get("scaling/straggler_skew"))
        self.found += [(state.global_step, f.check, f.ranks, f.message) for f in comparison.findings]
        return {}


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
    timer = LocalTimer(model, named(strategy), torch.device("cpu"))
    replicas = list(model.parameters()) if strategy == "ddp" else ()
    monitor = Monitor(hosts=hosts, timer=timer, replicas=replicas, checksum_every=20)
    part = Compared(monitor)
    collector = LogCollector()
    collector.add(part, part.judge)
    state = TrainerState()
    for step in range(1, steps + 1):
        if guilty == "data" and rank == 1:
            time.sleep(0.01)
        collector.batch_fetched()
        collector.on_step_begin(None, state, None)
        is_slow = rank == (step % rank_store.world_size if guilty == "rotating" else guilty)
        work.seconds = WORK_S * (ratio if is_slow else 1.0)
        optimizer.zero_grad()
        model(torch.full((2, 16), float(rank))).sum().backward()
        optimizer.step()
        if step == drift and rank == guilty:
            with torch.no_grad():
                work.layer.weight[0, 0] += 1e-3
        monitor.step_ended()
        collector.on_step_end(None, state, None)
        state.global_step = step
        if step % EVERY == 0:
            collector.keys(state, {})
            collector.on_log(None, state, None)
    monitor.stop()
    return {"found": part.found, "skews": part.skews, "hosts": hosts}


def run(world_size, ratio, guilty, steps=60, drift=None, strategy="ddp"):
    return Ranks(world_size, trained, ratio, guilty, steps, drift, strategy).finish(60)
