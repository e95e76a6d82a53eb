"""Measures what snapshots in host memory cost, with the interval that `hfscale run` chooses by itself.

A snapshot affects few steps: the one after which training waits for the copy, and those during which the snapshot is
written in the background. So the benchmark measures the extra time of one snapshot, and divides it by the time of the
steps between two snapshots that the run chooses. In one training of two processes, under DDP and under FSDP2, a
snapshot is taken at the first of every `2 * window` steps; a window is at least twice as long as the writing. The
extra time of this snapshot is the time of the first `window` steps minus that of the other `window` steps, so other
work on the machine affects both. Each snapshot also gives the interval that the run would have used after it.

The summary has the trimmed mean of the extra time, in wall-clock time and in CPU time of the process (which includes
the writing in the background), with its standard error (Yuen 1974, Biometrika 61, section 2: from the winsorized
variance), and the cost as a share of the time without snapshots, the plain mean beside it.
"""

import gc
import math
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from benchmarks.callback_overhead import LOGGED_EVERY, small_trainer
from benchmarks.launched import launch_benchmark, send_result
from hfscale import SpotCheckpointCallback
from hfscale.core.run_memory import RunMemory

SNAPSHOTS = 250
UNTIMED_SNAPSHOTS = 5  # the first ones allocate buffers, and the intervals after them are first guesses
STRATEGIES = ("ddp", "fsdp2")
TRIMMED = 0.1  # share of the smallest and of the largest values that the trimmed mean leaves out


class Windows(TrainerCallback):
    """Takes a snapshot every two windows of steps, and records when each step begins.

    Args:
        spot (`SpotCheckpointCallback`): the callback that takes the snapshots.
        folder (`Path`): folder of the snapshots of the training.
    """

    def __init__(self, spot: SpotCheckpointCallback, folder: Path) -> None:
        self.memory = spot.memory
        self.folder = folder
        self.window = 0
        self.first_steps: list[int] = []  # those after which a snapshot was taken
        self.intervals: list[int] = []  # that the run chose then, in steps
        self.wall: dict[int, float] = {}  # step: time at which it began, in seconds
        self.cpu: dict[int, float] = {}
        self.taken_at: int | None = None
        self.untimed = 0
        self.bytes = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        memory, step = self.memory, state.global_step + 1
        if memory._last_step != self.taken_at:  # after the last step
            self.taken_at = memory._last_step
            self.untimed += 1
            if self.untimed == UNTIMED_SNAPSHOTS:
                self.window = self._agree_window()
                gc.freeze()  # a collection takes a tenth of a second, and would be a part of some step
            if self.window:
                self.first_steps.append(step - 1)
                self.intervals.append(memory._next_step - step + 1)
                memory._next_step = step - 1 + 2 * self.window
        if len(self.first_steps) == SNAPSHOTS + 2:  # the first was before the windows; the last one has no end
            control.should_training_stop = True
            sizes = [sum(f.stat().st_size for f in path.rglob("*")) for path in self.folder.glob("checkpoint-*")]
            self.bytes = max(sizes, default=0)  # ranks other than the main one have another output directory
        self.wall[step], self.cpu[step] = time.perf_counter(), time.process_time()

    def _agree_window(self) -> int:
        """Return how many steps a window has, the same on all ranks: whole logging periods."""
        _, write_s, step_s = self.memory._measured()
        steps = torch.tensor(2 * write_s / step_s)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        return LOGGED_EVERY * (int(steps.item()) // LOGGED_EVERY + 1)

    def extras(self, times: dict[int, float]) -> list[float]:
        """Return the extra seconds of each snapshot whose two windows are complete."""
        found = []
        for first, following in zip(self.first_steps[1:], self.first_steps[2:], strict=False):
            if following == first + 2 * self.window:  # otherwise the last snapshot was still being written
                middle = times[first + self.window]
                found.append((middle - times[first]) - (times[following] - middle))
        return found


def measure() -> dict[str, Any]:
    """Launch two processes under each strategy."""
    found = {
        strategy: launch_benchmark("benchmarks.snapshot_cost", processes=2, config=strategy, supervised=True)
        for strategy in STRATEGIES
    }
    return {
        "summary": {strategy: result["summary"] for strategy, result in found.items()},
        "extra_ms": {strategy: result["extra_ms"] for strategy, result in found.items()},
    }


def main() -> None:
    """Run the training in one of the two processes."""
    memory = RunMemory.of_environment()
    assert memory is not None, "launch it with hfscale run"
    with tempfile.TemporaryDirectory() as output_dir, redirect_stdout(StringIO()):
        spot = SpotCheckpointCallback(cloud=None)
        windows = Windows(spot, memory.snapshots(output_dir))
        trainer = small_trainer(output_dir, [spot, windows])
        trainer.args.max_steps, trainer.args.save_strategy = 1_000_000, SaveStrategy.NO
        trainer.train()
    if dist.get_rank() == 0:
        send_result(result_of(windows))
    dist.barrier()
    dist.destroy_process_group()


def result_of(windows: Windows) -> dict[str, Any]:
    """Return the summary, and the extra milliseconds of each snapshot."""
    wall, cpu = windows.extras(windows.wall), windows.extras(windows.cpu)
    steps_apart = statistics.fmean(windows.intervals[1:])
    first, last = windows.first_steps[1], windows.first_steps[-1]
    second_halves = [
        step
        for begin in windows.first_steps[1:-1]
        for step in range(begin + windows.window, begin + 2 * windows.window)
    ]
    step_s = statistics.fmean(windows.wall[step + 1] - windows.wall[step] for step in second_halves)
    cpu_s = statistics.fmean(windows.cpu[step + 1] - windows.cpu[step] for step in second_halves)
    mean_error = statistics.stdev(wall) / math.sqrt(len(wall))
    summary = {
        "snapshots": len(wall),
        "steps": last - first,
        "steps_of_a_window": windows.window,
        "step_ms": round(step_s * 1e3, 2),
        "steps_per_snapshot": round(steps_apart, 1),
        "extra_ms_per_snapshot": [round(1e3 * value, 2) for value in trimmed_mean(wall)],
        "cost_share": [round(value / (steps_apart * step_s), 5) for value in trimmed_mean(wall)],
        "cost_share_by_plain_mean": [
            round(value / (steps_apart * step_s), 5) for value in (statistics.fmean(wall), mean_error)
        ],
        "cost_share_of_cpu_time": [round(value / (steps_apart * cpu_s), 5) for value in trimmed_mean(cpu)],
        "bytes_of_a_snapshot": windows.bytes,
    }
    return {"summary": summary, "extra_ms": [round(1e3 * value, 2) for value in wall]}


def trimmed_mean(values: list[float]) -> tuple[float, float]:
    """Return the trimmed mean of some values, and its standard error."""
    ordered, cut = sorted(values), int(TRIMMED * len(values))
    kept = ordered[cut : len(ordered) - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    kept_share = len(kept) / len(values)
    return statistics.fmean(kept), statistics.stdev(winsorized) / (kept_share * math.sqrt(len(values)))


if __name__ == "__main__":
    main()
