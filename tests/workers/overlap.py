"""Ranks with different step times agree several times on a value that only one of them has.

Prints, as JSON, for each round the step at which each rank reads the value, and the seconds until it does.
"""

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hfscale.core.collectives import StepAgreement

WORLD, ROUNDS, STEPS = 3, 8, 120


def one_round(seed, rank):
    """The step at which this rank reads the value that rank `who` has from step `when` on, and seconds until then."""
    common, own = random.Random(seed), random.Random(f"{seed}-{rank}")
    who, when, step_s = (
        common.randrange(WORLD),
        common.randrange(1, STEPS // 2),
        common.choice([0.0, 0.002, 0.01, 0.03]),
    )
    agreement = StepAgreement("test", 0.05, overlapped=True)
    noticed: list[float] = []
    for step in range(1, STEPS + 1):
        time.sleep(own.uniform(0, 2 * step_s))
        dist.barrier()  # like the gradients of a step, it keeps ranks within one step of each other
        if (rank, step) == (who, when):
            noticed.append(time.monotonic())
        agreed = agreement.step(lambda: {"other": 1.0, "noticed": 2.0 * len(noticed)})
        if agreed == {"other": 1.0, "noticed": 2.0}:
            agreement.finish()
            return step, time.monotonic() - noticed[0] if noticed else 0.0
    return None, 0.0


def rank_main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results = [one_round(seed, rank) for seed in range(ROUNDS)]
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=WORLD, start_method="fork")
        ranks = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(WORLD)]
    rounds = [{"steps": [r[0] for r in row], "wait_s": max(r[1] for r in row)} for row in zip(*ranks, strict=True)]
    json.dump(rounds, sys.stdout)
