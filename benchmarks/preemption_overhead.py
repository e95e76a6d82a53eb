"""What the agreement on preemption notices adds to a data-parallel step of about 30 ms on two ranks.

Two processes take steps of matrix products and an all-reduce of "gradients"; turns with and without overlapped
exchanges of `StepAgreement` alternate in one process group, a pair is two consecutive turns, and the order within a
pair alternates. The ratio of a pair is noisy on a shared machine, so the time spent inside `StepAgreement.step` itself
is reported too, and that of the obvious alternative: an all-reduce that is waited for at each step.
"""

import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hfscale.checkpoint.preemption.stop import EXCHANGE_EVERY_S
from hfscale.core.collectives import TRAINING, StepAgreement

PAIRS = 15
STEPS = 60
STEP_S = 0.03


def calibrated() -> Callable[[], None]:
    """A step of compute that takes `STEP_S` on this machine with both ranks at work."""
    matrix = torch.randn(256, 256)

    def multiply(times: int) -> None:
        for _ in range(times):
            matrix @ matrix

    multiply(50)
    begun = time.perf_counter()
    multiply(200)
    times = torch.tensor([max(1.0, 200 * STEP_S / (time.perf_counter() - begun))], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MIN)
    return functools.partial(multiply, int(times.item()))


def one_turn(work: Callable[[], None], exchange: Callable[[], Any]) -> tuple[float, float]:
    """Seconds per step, and of them those in `exchange`."""
    gradients, inside = torch.zeros(100_000), 0.0
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(STEPS):
        work()
        dist.all_reduce(gradients)
        entered = time.perf_counter()
        exchange()
        inside += time.perf_counter() - entered
    return (time.perf_counter() - begun) / STEPS, inside / STEPS


def rank_main(rank: int, folder: str) -> None:
    """Writes `summary` and `pairs` on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    TRAINING.barrier("begin")
    work, agreement = calibrated(), StepAgreement("votes", EXCHANGE_EVERY_S, overlapped=True)
    exchanges = {
        "without": lambda: None,
        "overlapped": lambda: agreement.step(lambda: {"stop": 0.0}),
        "waited for": lambda: TRAINING.maximum("vote", [0.0]),
    }
    one_turn(work, exchanges["overlapped"])
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in exchanges}
    for pair in range(PAIRS):
        for name in exchanges if pair % 2 else reversed(exchanges):
            turns[name].append(one_turn(work, exchanges[name]))
    agreement.finish()
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(turns))
    dist.barrier()
    dist.destroy_process_group()


def measure() -> dict[str, Any]:
    """Alternate `PAIRS` pairs; the summary holds medians."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), nprocs=2, start_method="fork")  # type: ignore[attr-defined]
        turns = json.loads(Path(folder, "result.json").read_text())
    step_s = statistics.median(total for total, _ in turns["without"])

    def ratios(name: str) -> list[float]:
        return [turn[0] / plain[0] for turn, plain in zip(turns[name], turns["without"], strict=True)]

    summary: dict[str, Any] = {"step_ms": round(step_s * 1e3, 2)}
    for name in ("overlapped", "waited for"):
        inside = statistics.median(own for _, own in turns[name])
        summary[name] = {
            "ratio_with_over_without": round(statistics.median(ratios(name)), 4),
            "us_per_step": round(inside * 1e6, 1),
            "share_of_step": round(inside / step_s, 5),
        }
    return {"summary": summary, "pairs": [round(ratio, 4) for ratio in ratios("overlapped")]}
