"""What it saves that one micro-batch computes while tokens of another one are sent to their experts.

Two stages per rank with the schedule DualPipeV on two pipeline ranks, each of two processes over which the experts are
spread. Both variants, with and without the overlap, run alternately in the same processes and differ in nothing else.
A pair is two consecutive runs, one of each variant; the order within a pair alternates.

What there is to save depends on the network. The result names the bandwidth of the loopback interface, which root can
limit before and free after it:

    tc qdisc add dev lo root tbf rate 500mbit burst 256kb latency 1s
    tc qdisc del dev lo root
"""

import re
import statistics
import subprocess
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launched import launch_benchmark, send_result
from benchmarks.pipeline_overhead import random_rows, run_pair, tiny_config, train_with_trainer, training_arguments

PAIRS = 4  # in more of them the threads that Gloo keeps slow down the steps (benchmarks/pipeline_overhead.py)
STAGES, EXPERT_RANKS = 2, 2


def measure() -> dict[str, Any]:
    """Launch the processes."""
    runs = launch_benchmark("benchmarks.expert_overlap", processes=STAGES * EXPERT_RANKS)
    ratios = sorted(runs["pace_over_without"])
    summary = {
        "link": _limit_of_loopback(),
        "pairs": len(ratios),
        "steps_per_s_over_without": round(statistics.median(ratios), 4),
        "quartiles": [round(ratio, 4) for ratio in (ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4])],
    }
    return {"summary": summary, "runs": runs}


def _limit_of_loopback() -> str:
    """Return the bandwidth that `tc` shows for the loopback interface, such as `500Mbit`, or `unlimited`."""
    shown = subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=False).stdout
    rate = re.search(r"rate (\S+)", shown)
    return rate[1] if rate else "unlimited"


def worker() -> None:
    """Run in each process of the launch."""
    from hfscale import ParallelArguments

    torch.set_num_threads(1)
    config = tiny_config(EXPERT_RANKS)
    config.num_hidden_layers = 2 * STAGES * 2
    rows = random_rows(EXPERT_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        args = training_arguments(folder)
        variants = {}
        for name, overlap in (("with", True), ("without", False)):
            parallel = ParallelArguments(
                pp_size=STAGES, ep_size=EXPERT_RANKS, pipeline_schedule="DualPipeV", overlap_exchange=overlap
            )
            variants[name] = partial(train_with_trainer, args, rows, config, parallel)
        results = [run_pair(variants, pair) for pair in range(PAIRS + 1)][1:]  # the first pair warms up
        if dist.get_rank() == 0:
            seconds = {name: [one[name]["step_s"] for one in results] for name in variants}
            ratios = [b / a for a, b in zip(seconds["with"], seconds["without"], strict=True)]
            send_result({"pace_over_without": [round(ratio, 4) for ratio in ratios], "step_s": seconds})
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    worker()
