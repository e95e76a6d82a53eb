"""Measures what ScalingCallback with every measurement on adds to a Trainer step in two processes.

Trainings with and without it alternate in the same processes. The result has the ratio of each pair, and the time
inside hfscale's own code, which other work on the machine affects less. The time in its exchanges is given separately:
most of it is waiting for the other process, for which the next gradient reduction would have waited otherwise. The
pre-flight checks are timed separately too.
"""

import gc
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from benchmarks.callback_overhead import STEPS, UNTIMED_STEPS, OwnTime, full_callback, small_trainer
from benchmarks.launched import launch_benchmark, send_result
from hfscale import CommHealthCallback
from hfscale.core.collectives import Channel

PAIRS = 3


class TimedCommHealth(CommHealthCallback):
    """Measures the time that the callback takes when training begins."""

    begin_s = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        super().on_train_begin(*args, **kwargs)
        self.begin_s = time.perf_counter() - begun


class Stopwatch(TrainerCallback):
    """Measures the seconds from the last untimed step to the last step.

    Args:
        counted (`OwnTime`): Counters that count during these steps only.
    """

    def __init__(self, *counted: OwnTime) -> None:
        self.counted = counted
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == UNTIMED_STEPS:
            gc.freeze()
            for own in self.counted:
                own.restart()
            self.begun = time.perf_counter()
        if state.global_step == STEPS:
            self.seconds = time.perf_counter() - self.begun
            for own in self.counted:
                own.is_counting = False


def measure() -> dict[str, Any]:
    """Launch two processes; the summary has medians."""
    return launch_benchmark("benchmarks.ranks_overhead", processes=2)


def main() -> None:
    """Run the trainings in one of the two processes."""
    own = OwnTime()
    steps = STEPS - UNTIMED_STEPS
    own.wrap_all()
    exchanges = OwnTime()
    for exchange in ("combine_numbers", "maximum"):
        exchanges.wrap(Channel, exchange)
    ratios: list[float] = []
    bare_s: list[float] = []
    own_s: list[float] = []
    exchange_s: list[float] = []
    begins: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        for pair in range(PAIRS):
            seconds = {}
            for with_callback in (True, False) if pair % 2 else (False, True):
                watch = Stopwatch(own, exchanges)
                health = TimedCommHealth()
                callbacks = [full_callback(health), watch] if with_callback else [watch]
                with redirect_stdout(StringIO()):
                    small_trainer(f"{root}/{pair}-{with_callback}", callbacks).train()
                seconds[with_callback] = watch.seconds
                if with_callback:
                    own_s.append((own.seconds - exchanges.seconds) / steps)
                    exchange_s.append(exchanges.seconds / steps)
                    begins.append(health.begin_s)
            ratios.append(seconds[True] / seconds[False])
            bare_s.append(seconds[False] / steps)
    step_s = statistics.median(bare_s)
    summary = {
        "step_ms": round(step_s * 1e3, 2),
        "ratio_with_over_without": round(statistics.median(ratios), 4),
        "own_code_us_per_step": round(statistics.median(own_s) * 1e6, 1),
        "own_code_share_of_step": round(statistics.median(own_s) / step_s, 5),
        "exchange_us_per_step": round(statistics.median(exchange_s) * 1e6, 1),
        "begin_s": round(statistics.median(begins), 3),
    }
    if dist.get_rank() == 0:
        send_result({"summary": summary, "pairs": [round(ratio, 4) for ratio in ratios]})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
