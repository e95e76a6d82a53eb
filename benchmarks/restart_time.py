"""Measures how long a recipe needs from the SIGKILL of a rank to its next complete step, and what takes the time.

The real command runs: `hfscale run -- accelerate launch recipes/…/train.py`, with and without standby processes in
turn. In each launch a rank chosen at random is killed when it has completed a few steps. The losses of all runs are
compared with those of a run without a kill.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.launched import REPOSITORY
from hfscale.core.recovery_times import RECOVERY_PARTS, shown_name
from hfscale.core.run_files import JSONL_NAME
from hfscale.core.run_memory import DEFAULT_ROOT, RunMemory

SCRIPTS = {"ddp": "recipes/ddp/train.py", "fsdp2": "recipes/sharded/train.py", "zero3": "recipes/sharded/train.py"}
PAIRS, KILLS = 1, 3
STEPS_UNTIL_A_KILL, STEPS = 12, 60  # a standby process needs some steps until it is ready
_SECONDS_OF_A_RUN = 900.0
_FLAGS = {
    "block_size": 64,
    "per_device_train_batch_size": 2,
    "max_train_samples": 64,
    "max_eval_samples": 4,
    "max_steps": STEPS,
    "save_steps": 1000,
    "logging_steps": 1,
    "dataloader_num_workers": 0,
    "disable_tqdm": "true",
    "lr_scheduler_type": "linear",
}


def measure(strategies: tuple[str, ...] = tuple(SCRIPTS), pairs: int = PAIRS) -> dict[str, Any]:
    """Run the trainings of each strategy; the summary has medians of seconds."""
    runs = []
    for strategy in strategies:
        with tempfile.TemporaryDirectory() as root:
            _, expected = _run(strategy, Path(root, "whole"), kills=0, standby=False)
            for pair in range(pairs):
                for standby in (True, False) if pair % 2 else (False, True):
                    recoveries, losses = _run(strategy, Path(root, f"{pair}-{standby}"), kills=KILLS, standby=standby)
                    equal = losses == expected
                    runs.append({"strategy": strategy, "standby": standby, "equal": equal, "recoveries": recoveries})
    summary = {
        f"{strategy}, {'standby' if standby else 'no standby'}": _medians(
            [r for run in runs if (run["strategy"], run["standby"]) == (strategy, standby) for r in run["recoveries"]]
        )
        for strategy in strategies
        for standby in (False, True)
    }
    return {"summary": summary, "all_losses_equal": all(run["equal"] for run in runs), "runs": runs}


def _medians(recoveries: list[dict[str, float]]) -> dict[str, float]:
    names = [name for name in recoveries[0] if name.endswith("_s")]
    return {name: round(statistics.median(recovery[name] for recovery in recoveries), 2) for name in names}


def _run(strategy: str, folder: Path, *, kills: int, standby: bool) -> tuple[list[dict[str, float]], dict[int, float]]:
    """Run one training; return its recoveries and its losses by step."""
    folder.mkdir()
    log, output_dir = folder / "run.jsonl", folder / "out"
    command = f"accelerate launch --config_file accelerate_configs/{strategy}.yaml --num_processes 2".split()
    with tempfile.TemporaryDirectory(dir=DEFAULT_ROOT) as memory, (folder / "output").open("w") as output:
        options = ["--memory-dir", memory, "--memory-interval-steps", "1", "--log", str(log)]
        options += [] if standby else ["--no-standby"]
        flags = [f"--{name}={value}" for name, value in {**_FLAGS, "output_dir": output_dir}.items()]
        process = subprocess.Popen(
            [sys.executable, "-m", "hfscale", "run", *options, "--", *command, SCRIPTS[strategy], *flags],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        )
        killed_at = _kill_ranks(process, Path(memory), kills, random.Random(folder.name))  # noqa: S311
        code = process.wait(_SECONDS_OF_A_RUN)
    if code:
        raise RuntimeError(f"the run ended with exit code {code}:\n{(folder / 'output').read_text()[-4000:]}")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    restarts = [event for event in events if event["event"] == "restart"]
    recovered = [event for event in events if event["event"] == "recovered"]
    recoveries = []
    for at, restart, event in zip(killed_at, restarts, recovered, strict=True):
        parts = {"detecting_s": restart["failed_at"] - at}
        parts |= {name: event[shown_name(name)] for name in RECOVERY_PARTS}
        recoveries.append({**parts, "total_s": sum(parts.values()), "steps_lost": event["steps_lost"]})
    records = [json.loads(line) for line in (output_dir / JSONL_NAME).read_text().splitlines()]
    return recoveries, {record["step"]: record["loss"] for record in records if "loss" in record}


def _kill_ranks(process: subprocess.Popen[bytes], root: Path, kills: int, chance: random.Random) -> list[float]:
    """Kill one rank in each of the first launches; return the Unix times."""
    killed_at: list[float] = []
    done = 0
    while len(killed_at) < kills and process.poll() is None:
        time.sleep(0.1)
        completed = max((RunMemory(folder).furthest()[1] for folder in root.glob("hfscale-run-*")), default=0)
        ranks = _ranks(process.pid) if completed >= done + STEPS_UNTIL_A_KILL else {}
        if len(ranks) < 2:
            continue
        done = completed
        killed_at.append(time.time())
        os.kill(ranks[chance.randrange(2)], signal.SIGKILL)
    return killed_at


def _ranks(supervisor: int) -> dict[int, int]:
    """Return the process of each rank that trains: it has a file of its progress in memory."""
    found = {}
    for child in psutil.Process(supervisor).children(recursive=True):
        try:
            maps = [Path(mapped.path).name for mapped in child.memory_maps()]
        except psutil.Error:
            continue
        found |= {int(name.removeprefix("progress-")): child.pid for name in maps if name.startswith("progress-")}
    return found
