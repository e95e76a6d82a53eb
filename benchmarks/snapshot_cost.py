"""Measures what snapshots in host memory cost, with the interval that `hfscale run` chooses by itself.

In one training of two processes, under DDP and under FSDP2, blocks of steps with and without a snapshot alternate: a
block with one begins with the step that takes it and ends before the next one would be taken, and the block after it
has as many steps. Adjacent blocks make a pair, so other work on the machine affects both. The summary has the medians
of the ratios of pairs, in wall-clock time and in CPU time of the process (which includes the writing in the
background), their standard errors, the bytes of a snapshot and the number of steps between two of them.
"""

import math
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from benchmarks.callback_overhead import small_trainer
from benchmarks.launched import launch_benchmark, send_result
from hfscale import SpotCheckpointCallback
from hfscale.recovery.run_memory import RunMemory

STEPS = 1200
UNTIMED_PAIRS = 2  # the first snapshot allocates its buffers, and the interval after it is a first guess
STRATEGIES = ("ddp", "fsdp2")


class Blocks(TrainerCallback):
    """Alternates blocks of steps with one snapshot and blocks of as many steps without, and times them.

    Args:
        spot (`SpotCheckpointCallback`): the callback that takes the snapshots.
        folder (`Path`): folder of the snapshots of the training.
    """

    def __init__(self, spot: SpotCheckpointCallback, folder: Path) -> None:
        self.memory = spot.memory
        self.folder = folder
        self.saving: Any = None
        self.begun: list[tuple[int, float, float, bool]] = []  # step, wall and CPU seconds, whether with a snapshot
        self.next_block = 0
        self.bytes = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        memory, step = self.memory, state.global_step + 1
        if self.begun and self.begun[-1][0] == step - 1 and self.begun[-1][-1]:  # its snapshot has been taken
            self.next_block = memory._next_step
            self.length = self.next_block - self.begun[-1][0]
        if self.saving is None and step == memory._next_step:
            self.saving = memory._saving
            self._begin(step, is_on=True)
        elif self.saving is not None and step == self.next_block:
            is_on = not self.begun[-1][-1]
            memory._saving = self.saving if is_on else None
            if is_on:
                memory._next_step = step
            self._begin(step, is_on=is_on)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS:
            sizes = [sum(f.stat().st_size for f in path.rglob("*")) for path in self.folder.glob("checkpoint-*")]
            self.bytes = max(sizes, default=0)  # ranks other than the main one have another output directory

    def _begin(self, step: int, *, is_on: bool) -> None:
        self.begun.append((step, time.perf_counter(), time.process_time(), is_on))
        if not is_on:
            self.next_block = step + self.length


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
    """Run the training in one of the two processes."""
    memory = RunMemory.of_environment()
    assert memory is not None, "launch it with hfscale run"
    with tempfile.TemporaryDirectory() as output_dir, redirect_stdout(StringIO()):
        spot = SpotCheckpointCallback(cloud=None)
        blocks = Blocks(spot, memory.snapshots(output_dir))
        trainer = small_trainer(output_dir, [spot, blocks])
        trainer.args.max_steps, trainer.args.save_strategy = STEPS, SaveStrategy.NO
        trainer.train()
    pairs = []
    for on, off, end in zip(blocks.begun[::2], blocks.begun[1::2], blocks.begun[2::2], strict=False):
        steps, wall_s, cpu_s = off[0] - on[0], end[1] - off[1], end[2] - off[2]
        ratios = {"wall": (off[1] - on[1]) / wall_s, "cpu": (off[2] - on[2]) / cpu_s}
        pairs.append({"steps": steps, "step_ms": wall_s / steps * 1e3, **ratios})
    timed = pairs[UNTIMED_PAIRS:]
    summary = {
        "pairs": len(timed),
        "step_ms": round(statistics.median(pair["step_ms"] for pair in timed), 2),
        "ratio_with_over_without": _median_and_error([pair["wall"] for pair in timed]),
        "ratio_of_cpu_time": _median_and_error([pair["cpu"] for pair in timed]),
        "steps_per_snapshot": statistics.median(pair["steps"] for pair in timed),
        "bytes_of_a_snapshot": blocks.bytes,
    }
    if dist.get_rank() == 0:
        send_result({"summary": summary, "pairs": [{k: round(v, 4) for k, v in pair.items()} for pair in pairs]})
    dist.barrier()
    dist.destroy_process_group()


def _median_and_error(ratios: list[float]) -> list[float]:
    """Return the median, and its standard error (1.253 times that of the mean, for a normal distribution)."""
    error = 1.253 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return [round(statistics.median(ratios), 4), round(error, 4)]


if __name__ == "__main__":
    main()
