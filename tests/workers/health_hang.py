"""A training loop in forked ranks, one of which makes it hang."""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from workers.health import Ranks, gloo

from hfscale.health.hang import HangWatchdog

FAULT_STEP = 8


def trained(rank_store, rank, fault, guilty, limits, steps, output_dir):
    """What the watchdog found, and how long after the fault. The loop runs in a thread, since it may hang."""
    loop = Loop(rank_store, rank, fault, guilty, limits, steps, output_dir)
    loop.start()
    until = time.monotonic() + 200
    while loop.is_alive() and not loop.found() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)  # for the rank that writes the report
    after_s = time.monotonic() - 0.2 - loop.fault_at if loop.fault_at else None
    return {"found": loop.found(), "after_s": after_s, "folder": loop.watchdog.folder}


class Loop(threading.Thread):
    """Steps of an all-reduce and an all-gather, with an all-reduce on a side group every fifth step."""

    def __init__(self, rank_store, rank, fault, guilty, limits, steps, output_dir):
        super().__init__(daemon=True)
        self.rank_store = rank_store
        self.rank = rank
        self.fault = fault
        self.guilty = guilty
        self.limits = limits
        self.steps = steps
        self.output_dir = output_dir
        self.fault_at = None
        self.watchdog = None

    def found(self):
        return [(f.ranks, f.host, f.message) for f in self.watchdog.findings] if self.watchdog else []

    def run(self):
        gloo(self.rank_store)
        side = dist.new_group(backend="gloo")
        self.watchdog = HangWatchdog(self.rank_store, Path(self.output_dir), limits=self.limits)
        if self.fault == "none":
            self.watchdog.start()
        generator = torch.Generator().manual_seed(self.rank)
        value = torch.ones(256)
        try:
            for step in range(self.steps):
                self.watchdog.step_began(step)
                time.sleep(0.01 + 0.02 * float(torch.rand(1, generator=generator)))
                if self.fault != "none" and step == FAULT_STEP:
                    dist.barrier()
                    self.watchdog.start()  # not earlier: a slow start or a stall of the machine is no hang
                    self.fault_at = time.monotonic()
                one_step(self.fault if self.rank == self.guilty and step == FAULT_STEP else "none", value, side)
                self.watchdog.step_ended()
                if step % 5 == 4:
                    dist.all_reduce(torch.ones(3), group=side)
            dist.barrier()
        except RuntimeError as error:
            self.watchdog.examine_failure(error)
        while self.fault != "none":
            time.sleep(1)


def one_step(fault, value, side):
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sleep":
        time.sleep(1000)
    if fault == "raise":
        raise RuntimeError("the optimizer broke")
    if fault == "reorder":
        dist.all_gather([torch.empty(256) for _ in range(dist.get_world_size())], value)
    if fault != "skip":
        dist.all_reduce(value)
    value.div_(dist.get_world_size())
    if fault == "other_group":
        dist.all_reduce(torch.ones(3), group=side)
    if fault != "reorder":
        dist.all_gather([torch.empty(256) for _ in range(dist.get_world_size())], value)


def run(world_size, fault, guilty, limits, output_dir, steps=30):
    silent = (guilty,) if fault in ("stop", "kill") else ()
    ranks = Ranks(world_size, trained, fault, guilty, limits, steps, str(output_dir))
    return ranks.finish(240, without=silent)
