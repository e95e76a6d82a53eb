"""A training loop in forked ranks that one of them brings to a stand."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from workers.health import Ranks, gloo, mark

from hfscale.health.hang import HangWatchdog

FAULT_STEP = 8


def trained(rank_store, rank, fault, guilty, limits, steps, output_dir):
    """What the watchdog found, and how long after the fault; the loop runs on a thread of its own, for it may hang."""
    loop = Loop(rank_store, rank, fault, guilty, limits, steps, output_dir)
    loop.start()
    until = time.monotonic() + 50
    while loop.is_alive() and not loop.found() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)  # for the writer
    after_s = time.monotonic() - 0.2 - loop.fault_at if loop.fault_at else None
    return {"found": loop.found(), "after_s": after_s, "folder": loop.dog.folder}


class Loop(threading.Thread):
    """Steps of an all-reduce and an all-gather each, with an all-reduce on a side group now and then."""

    def __init__(self, rank_store, rank, fault, guilty, limits, steps, output_dir):
        super().__init__(daemon=True)
        self.rank_store, self.rank, self.steps, self.limits, self.output_dir = (
            rank_store,
            rank,
            steps,
            limits,
            output_dir,
        )
        self.fault, self.guilty, self.fault_at, self.dog = fault, guilty, None, None

    def found(self):
        return [(f.ranks, f.host, f.message) for f in self.dog.findings] if self.dog else []

    def run(self):
        gloo(self.rank_store)
        side = dist.new_group(backend="gloo")
        self.dog = HangWatchdog(self.rank_store, Path(self.output_dir), limits=self.limits)
        self.dog.start()
        generator = torch.Generator().manual_seed(self.rank)
        value = torch.ones(256)
        try:
            for step in range(self.steps):
                self.dog.step_began(step)
                time.sleep(0.01 + 0.02 * float(torch.rand(1, generator=generator)))
                if self.fault != "none" and step == FAULT_STEP:
                    self.fault_at = time.monotonic()
                one_step(self.fault if self.rank == self.guilty and step == FAULT_STEP else "none", value, side)
                self.dog.step_ended()
                if step % 5 == 4:
                    dist.all_reduce(torch.ones(3), group=side)
            dist.barrier()
        except RuntimeError as error:
            self.dog.examine_failure(error)
        while self.fault != "none":
            time.sleep(1)


def one_step(act, value, side):
    if act == "stop":
        mark("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "sleep":
        time.sleep(1000)
    if act == "raise":
        raise RuntimeError("the optimizer broke")
    if act == "reorder":
        dist.all_gather([torch.empty(256) for _ in range(dist.get_world_size())], value)
    if act != "skip":
        dist.all_reduce(value)
    value.div_(dist.get_world_size())
    if act == "aside":
        dist.all_reduce(torch.ones(3), group=side)
    if act != "reorder":
        dist.all_gather([torch.empty(256) for _ in range(dist.get_world_size())], value)


def run(world_size, fault, guilty, limits, output_dir, steps=30):
    silent = (guilty,) if fault in ("stop", "kill") else ()
    ranks = Ranks(world_size, trained, fault, guilty, limits, steps, str(output_dir))
    return ranks.finish(60, without=silent)
