"""`python -m benchmarks [NAME …]`: runs the benchmarks named, or all, and writes one result file each.

`python -m benchmarks control_plane --ranks 1024,4096` simulates these numbers of ranks.
"""

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import torch

NAMES = (
    "callback_overhead",
    "ranks_overhead",
    "cli_start",
    "recipe_overhead",
    "pipeline_overhead",
    "pipeline_bubble",
    "expert_overlap",
    "preemption_overhead",
    "memory_options",
    "activations",
    "async_save",
    "native_save_stall",
    "snapshot_cost",
    "restart_time",
    "packing",
    "control_plane",
    "islands",
    "tune_choice",
    "planner_experts",
    "planner_published",
    "gradient_accumulation",
    "step_traffic",
    "jitter",
    "load_once",
)
NEED_A_GPU = ("memory_options",)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    everything = [name for name in NAMES if torch.cuda.is_available() or name not in NEED_A_GPU]
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--ranks", type=lambda text: tuple(map(int, text.split(","))))
    asked = parser.parse_args()
    for name in asked.names or everything:
        if name not in NAMES:
            sys.exit(f"no benchmark is named '{name}': choose one of {', '.join(NAMES)}")
        options = {"ranks": asked.ranks} if asked.ranks and name == "control_plane" else {}
        result = import_module(f"benchmarks.{name}").measure(**options)
        machine = {
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, **result}, indent=1) + "\n")
        print(f"{name}: {json.dumps(result['summary'])}")


if __name__ == "__main__":
    main()
