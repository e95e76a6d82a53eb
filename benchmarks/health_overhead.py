"""What CommHealthCallback, with everything on, adds to a Trainer step of about 30 ms in two processes.

As in `callback_overhead`: turns with and without it alternate in the same processes; beside the paired ratio is the
time inside its own code, which other work on the machine does not blur. The pre-flight is timed by itself.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 -m benchmarks.health_overhead
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.callback_overhead import STEPS, UNTIMED_STEPS, OwnTime, one_turn
from hfscale import CommHealthCallback
from hfscale.callbacks.log_keys import LogKeys
from hfscale.health.local_time import LocalTimer

PAIRS = 5
CONFIG = Path(__file__).parent.parent / "accelerate_configs" / "ddp.yaml"


class Timed(CommHealthCallback):
    """Times what happens when training begins."""

    begin_s = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        super().on_train_begin(*args, **kwargs)
        Timed.begin_s = time.perf_counter() - begun


def measure() -> dict[str, Any]:
    """Launch two processes; their rank 0 prints the result as its last line."""
    argv = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG), "--num_processes", "2"]
    done = subprocess.run([*argv, "-m", "benchmarks.health_overhead"], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def main() -> None:
    """One of the two processes."""
    own, ratios, bare_s, own_s, begins = OwnTime(), [], [], [], []
    for event in ("on_step_begin", "on_step_end", "on_substep_end", "on_log"):
        own.wrap(CommHealthCallback, event)
    own.wrap(LogKeys, "on_log")
    for hook in ("_begin", "_end"):
        own.wrap(LocalTimer, hook)
    with tempfile.TemporaryDirectory() as root:
        one_turn(None, f"{root}/warm-up")
        for pair in range(PAIRS):
            turns = {}
            for with_callback in (True, False) if pair % 2 else (False, True):
                own.restart()
                callback = Timed() if with_callback else None
                turns[with_callback] = one_turn(callback, f"{root}/{pair}-{with_callback}", own)
                if with_callback:
                    own_s.append(own.seconds / (STEPS - UNTIMED_STEPS))
                    begins.append(Timed.begin_s)
            ratios.append(turns[True] / turns[False])
            bare_s.append(turns[False])
    step_s = statistics.median(bare_s)
    summary = {
        "step_ms": round(step_s * 1e3, 2),
        "ratio_with_over_without": round(statistics.median(ratios), 4),
        "own_code_us_per_step": round(statistics.median(own_s) * 1e6, 1),
        "own_code_share_of_step": round(statistics.median(own_s) / step_s, 5),
        "begin_s": round(statistics.median(begins), 3),
    }
    if dist.get_rank() == 0:
        print("\n" + json.dumps({"summary": summary, "pairs": [round(ratio, 4) for ratio in ratios]}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
