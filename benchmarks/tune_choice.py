"""Measures whether `hfscale tune` chooses the fastest of three strategies on this machine.

`hfscale tune` runs the best three configurations of a plan for recipes/ddp in two processes, which talk over gloo if
there is no GPU. Then all of them run again, in turn, several times: the choice is right if it is the fastest of these
runs too. The summary has the choice, the fastest by the median of the repeated runs, and the ratio of their speeds.
"""

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hfscale.facts.hardware import Accelerator
from hfscale.tune.launch_command import read_command
from hfscale.tune.tune_command import Tuning, plan_command, progress

PROCESSES = 2
CONFIGURATIONS = 3
STEPS = 5
"""Measured optimizer steps of the first round and of a repeated run."""
ROUNDS = 3
"""How often all configurations run again."""
RECIPE = Path(__file__).parent.parent / "recipes" / "ddp" / "train.py"
CPU = Accelerator(
    name="cpu",
    aliases=(),
    device_names=(),
    fp32_tflops=0.1,
    achieved_fp32_tflops=0.1,
    memory_tb_s=0.01,
    achieved_memory_tb_s=0.01,
    achieved_link_gb_s=1.0,
    hop_us=500.0,
    memory_gib=8.0,
    source="two cores, roughly",
    date="2026",
)


def measure() -> dict[str, Any]:
    """Tune, run all configurations again, and return their speeds in tokens/s of all processes."""
    command = ["accelerate", "launch", "--num_processes", str(PROCESSES), str(RECIPE), "--block_size", "128"]
    asked = read_command(command)
    with tempfile.TemporaryDirectory() as folder:
        tuning = Tuning(command=asked, plan=plan_command(asked, CPU), output_dir=Path(folder), ends=math.inf)
        tuning.choose(CONFIGURATIONS)
        tuning.run(STEPS)
        rows = tuning.to_dict()["configurations"]
        again: dict[str, list[float]] = {name: [] for name in tuning.configurations}
        with progress(ROUNDS * CONFIGURATIONS) as show:
            for _ in range(ROUNDS):
                for name, rates in again.items():
                    rate = tuning.run_one(name, STEPS, show).tokens_per_s
                    if rate is not None:
                        rates.append(rate)
    kept = ("name", "strategy", "predicted_tokens_per_s", "measured_tokens_per_s", "error", "reason", "steps")
    medians = {name: statistics.median(rates) for name, rates in again.items() if rates}
    fastest = max(medians, key=lambda name: medians[name])
    chosen = tuning.chosen
    return {
        "summary": {
            "strategies": sorted({row["strategy"] for row in rows}),
            "chosen": chosen,
            "fastest_of_repeated_runs": fastest,
            "chosen_over_fastest": None if chosen is None else round(medians[chosen] / medians[fastest], 3),
        },
        "configurations": [{key: row[key] for key in kept} | {"again": again[row["name"]]} for row in rows],
    }
