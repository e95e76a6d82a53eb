"""Measures what snapshots in host memory cost, with the interval that `hfscale run` chooses by itself.

Trainings with and without snapshots alternate in the same two processes, under DDP and FSDP2. The summary has the
median of the ratios of pairs, the bytes of a snapshot and the number of steps between two of them.
"""

import os
import statistics
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from benchmarks.callback_overhead import STEPS, UNTIMED_STEPS, small_trainer
from benchmarks.launched import launch_benchmark, send_result
from benchmarks.ranks_overhead import Stopwatch
from hfscale import SpotCheckpointCallback
from hfscale.recovery.run_memory import FOLDER_VARIABLE, RunMemory

PAIRS = 5
STRATEGIES = ("ddp", "fsdp2")


class Snapshots(TrainerCallback):
    """Counts the snapshots after the untimed steps, and measures the largest one.

    Args:
        folder (`Path`): folder of the snapshots of the training.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: set[str] = set()
        self.bytes = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for snapshot in self.folder.glob("checkpoint-*"):
            if snapshot.name not in self.seen:
                self.seen.add(snapshot.name)
                self.bytes = max(self.bytes, sum(file.stat().st_size for file in snapshot.rglob("*")))


def measure() -> dict[str, Any]:
    """Launch two processes under each strategy; the summary has medians."""
    found = {
        strategy: launch_benchmark("benchmarks.snapshot_cost", processes=2, config=strategy, supervised=True)
        for strategy in STRATEGIES
    }
    return {
        "summary": {strategy: result["summary"] for strategy, result in found.items()},
        "pairs": {strategy: result["pairs"] for strategy, result in found.items()},
    }


def main() -> None:
    """Run the trainings in one of the two processes."""
    memory = RunMemory.of_environment()
    assert memory is not None, "launch it with hfscale run"
    ratios: list[float] = []
    steps_s: list[float] = []
    intervals: list[float] = []
    sizes: list[int] = []
    with tempfile.TemporaryDirectory() as root:
        for pair in range(PAIRS):
            seconds = {}
            for is_on in (True, False) if pair % 2 else (False, True):
                output_dir = f"{root}/{pair}-{is_on}"
                watch, snapshots = Stopwatch(), Snapshots(memory.snapshots(output_dir))
                if is_on:
                    os.environ[FOLDER_VARIABLE] = str(memory.folder)
                else:
                    os.environ.pop(FOLDER_VARIABLE, None)
                with redirect_stdout(StringIO()):
                    small_trainer(output_dir, [SpotCheckpointCallback(cloud=None), watch, snapshots]).train()
                seconds[is_on] = watch.seconds
                if is_on:
                    intervals.append(STEPS / max(len(snapshots.seen), 1))
                    sizes.append(snapshots.bytes)
            ratios.append(seconds[True] / seconds[False])
            steps_s.append(seconds[False] / (STEPS - UNTIMED_STEPS))
    summary = {
        "step_ms": round(statistics.median(steps_s) * 1e3, 2),
        "ratio_with_over_without": round(statistics.median(ratios), 4),
        "steps_per_snapshot": round(statistics.median(intervals), 1),
        "bytes_of_a_snapshot": max(sizes),
    }
    if dist.get_rank() == 0:
        send_result({"summary": summary, "pairs": [round(ratio, 4) for ratio in ratios]})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
