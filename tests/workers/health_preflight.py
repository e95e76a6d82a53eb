"""The pre-flight in forked ranks, one of which is faulty."""

import os
import signal
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from workers.health import Ranks, gloo

from hfscale.health import measure, preflight, rank_notes

CPU = torch.device("cpu")


def checked(rank_store, rank, fault, guilty, deadline_s):
    """What one rank finds, when `guilty` has `fault`."""
    if fault == "nodes" and rank >= rank_store.world_size // 2:  # one machine pretends to be two nodes
        rank_notes.socket = SimpleNamespace(gethostname=lambda: "node-b")
    if fault.startswith("staggered"):
        time.sleep(rank * float(fault.partition(":")[2]))
    if rank == guilty:
        make_faulty(fault, rank)

    def connect():
        gloo(rank_store, deadline_s)
        if fault == "interface" and rank == guilty:
            os.environ["GLOO_SOCKET_IFNAME"] = "nowhere9"

    plan = preflight.PreflightPlan(
        device=CPU,
        deadline_s=deadline_s,
        connect=connect,
        gloo=fault == "interface",
        sizes=(4096,),
        all_to_all=fault != "trains",
        rounds=3,
        compute_s=0.15,
    )
    found = preflight.run(rank_store, plan)
    return {
        "errors": [(f.ranks, f.host, f.check, f.message) for f in found.findings if f.level == "error"],
        "seconds": found.seconds,
        "stuck": found.stuck,
        "links": found.links,
    }


def make_faulty(fault, rank):
    """Change one call of torch on this rank."""
    name, _, place = fault.partition(":")
    if name == "absent":
        time.sleep(1000)
    if name in ("stopped", "killed"):
        number = signal.SIGSTOP if name == "stopped" else signal.SIGKILL
        before(place or "all_reduce", lambda: os.kill(os.getpid(), number))
    elif name == "slow":
        real, times = measure.multiply, float(place)

        def slower(left, right):
            begun = time.thread_time()  # of the core: other work on it does not count
            product = real(left, right)
            until = begun + (time.thread_time() - begun) * times
            while time.thread_time() < until:
                real(left[:16], right)
            return product

        measure.multiply = slower
    elif name == "wrong" and place == "matmul":
        real_product = measure.multiply
        measure.multiply = lambda left, right: real_product(left, right) + (torch.arange(len(left)) == 7)
    elif name == "wrong":
        change_result(place)
    elif name == "corrupt":
        real_make = measure.make_collective

        def corrupted(kind, size, device, group):
            collective = real_make(kind, size, device, group)
            if kind == place:
                collective.source.mul_(0)
            return collective

        measure.make_collective = corrupted
    elif name == "skip":
        skip(place)
    elif name == "reorder":
        measure.KINDS = tuple(reversed(measure.KINDS))
    elif name not in ("none", "trains", "interface"):
        raise AssertionError(fault)


CALLS = {
    "all_reduce": (dist, "all_reduce"),
    "all_gather": (measure, "_all_gather"),
    "reduce_scatter": (measure, "_reduce_scatter"),
    "all_to_all": (dist, "all_to_all_single"),
    "neighbours": (dist, "batch_isend_irecv"),
}


def before(kind, action):
    owner, name = CALLS[kind]
    real = getattr(owner, name)

    def acting(*args, **kwargs):
        action()
        return real(*args, **kwargs)

    setattr(owner, name, acting)


def change_result(kind):
    owner, name = CALLS[kind]
    real = getattr(owner, name)

    def wrong(output, *args, **kwargs):
        work = real(output, *args, **kwargs)
        output[len(output) // 2] += 1
        return work

    setattr(owner, name, wrong)


def skip(kind):
    owner, name = CALLS[kind]
    real, calls = getattr(owner, name), []

    def sometimes(*args, **kwargs):
        calls.append(1)
        return None if len(calls) == 2 else real(*args, **kwargs)

    setattr(owner, name, sometimes)


def run(world_size, fault, guilty, deadline_s):
    silent = (guilty,) if fault.startswith(("absent", "stopped", "killed")) else ()
    return Ranks(world_size, checked, fault, guilty, deadline_s).finish(deadline_s + 120, without=silent)
