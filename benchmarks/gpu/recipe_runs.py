"""Runs of a recipe on a shape, as users start it, and what its records say."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import OFFLINE, ON_GPU, REPOSITORY, TIMES_SLOWER, TINY, work_folder
from benchmarks.gpu.shapes import LORA_RANK, config_folder, shape_named, tokens_file
from hfscale.recovery.children import end_descendants

POLL_S = 0.05
KILL_LIMIT_S = 20
NEVER = ("--save_strategy", "no", "--save_minutes", "600")
SUMMARY = {
    "tokens_s": "scaling/tokens_per_s_per_gpu",
    "mfu": "scaling/mfu",
    "peak_gib": "gpu/memory_peak_gib",
    "data_wait": "scaling/data_wait_fraction",
    "loss": "loss",
}
"""Values of a result, and the metric keys they are the medians of."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a recipe is started on several processes."""

    config: str
    """Name of a file in `accelerate_configs`, without its suffix."""
    tier: str = "sharded"
    """The folder of the recipe."""
    processes: int = 1
    """Processes over all nodes."""
    options: tuple[str, ...] = ()
    """Further options of `accelerate launch`."""

    def command(self, script: Sequence[str]) -> list[str]:
        """Return the command that starts a script."""
        config_file = REPOSITORY / "accelerate_configs" / f"{self.config}.yaml"
        options = ["--config_file", str(config_file), "--num_processes", str(self.processes), *self.options]
        return [sys.executable, "-m", "accelerate.commands.launch", *options, *script]


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """A run that has ended."""

    folder: Path
    """Its output directory."""
    records: list[dict[str, Any]]
    """The lines of `scaling.jsonl`."""
    lines: list[str]
    """What hfscale has logged."""
    seconds: float
    """From the command to its end."""

    def summary(self) -> dict[str, float]:
        """Return the medians of the steady part, from the third log on, of the keys of `SUMMARY`."""
        logs = [row for row in self.records if SUMMARY["tokens_s"] in row and "train_runtime" not in row]
        steady = logs[2:] or logs[-1:]
        found = {}
        for name, key in SUMMARY.items():
            values = [row[key] for row in steady if key in row]
            if values:
                found[name] = round(statistics.median_low(values), 4)
        return found

    def losses(self) -> dict[int, float]:
        """Return the loss of each step that logged one; of a step that ran twice, the later one."""
        return {row["step"]: row["loss"] for row in self.records if "loss" in row}


def recipe_script(shape: str, flags: Sequence[str], *, tier: str, folder: Path, model: Path | None) -> list[str]:
    """Return a recipe and its arguments; a flag of `flags` replaces the default that stands here.

    Args:
        shape (`str`): The name of a shape.
        flags (`Sequence[str]`): Further flags.
        tier (`str`): The folder of the recipe.
        folder (`Path`): The output directory.
        model (`Path`, *optional*): A saved model; by default its weights are random.
    """
    of_shape = shape_named(shape)
    logging_steps = 5
    if TINY:
        logging_steps = 1
    script = [str(Path(__file__).with_name("fast_init.py")), str(REPOSITORY / "recipes" / tier / "train.py")]
    if model is None:
        script += ["--config_name", str(config_folder(shape))]
    else:
        script += ["--model_name_or_path", str(model)]
    defaults = {
        "--output_dir": folder,
        "--block_size": of_shape.length,
        "--per_device_train_batch_size": of_shape.micro_batch,
        "--gradient_accumulation_steps": of_shape.accumulation,
        "--max_steps": of_shape.steps,
        "--logging_steps": logging_steps,
        "--max_eval_samples": 4,
        "--validation_split_percentage": 1,
        "--disable_tqdm": "true",
    }
    if of_shape.lora:
        defaults |= {"--use_peft": "true", "--lora_r": LORA_RANK}
    if of_shape.recompute:
        defaults["--activation_checkpointing"] = "true"
    if not ON_GPU:
        defaults["--use_cpu"] = "true"
    if "--train_file" not in flags:
        defaults |= {"--train_file": tokens_file(of_shape.length), "--packing": "concat"}
    for name, value in defaults.items():
        if name not in flags:
            script += [name, str(value)]
    if "--save_steps" not in flags:
        script += NEVER
    return [*script, *flags]


def run_recipe(
    shape: str,
    flags: Sequence[str] = (),
    *,
    limit_s: float,
    launch: Launch | None = None,
    folder: Path | None = None,
    model: Path | None = None,
    cut: Callable[[Path], bool] | None = None,
) -> RecipeRun:
    """Run a recipe on a shape with its own defaults.

    Args:
        shape (`str`): The name of a shape.
        flags (`Sequence[str]`): Further flags of the recipe.
        limit_s (`float`): Seconds after which the run is killed; longer with tiny shapes.
        launch (`Launch`, *optional*): How it is launched; by default `recipes/ddp` runs in one process.
        folder (`Path`, *optional*): The output directory; by default a new one.
        model (`Path`, *optional*): A saved model; by default its weights are random.
        cut (`Callable`, *optional*): Called with the output directory many times a second. The run may end as it
            likes after this has returned `True`; it is for the function to kill what it wants to be killed.

    Returns:
        `RecipeRun`: What it left.

    Raises:
        RuntimeError: The run failed, or did not end in time. The message has the last line of its log with an error.
    """
    tier = "ddp"
    if launch is not None:
        tier = launch.tier
    folder = folder or Path(tempfile.mkdtemp(dir=work_folder(), prefix=f"run-{shape}-"))
    script = recipe_script(shape, flags, tier=tier, folder=folder, model=model)
    command = [sys.executable, *script]
    if launch is not None:
        command = launch.command(script)
    begun = time.monotonic()
    until = begun + TIMES_SLOWER * limit_s
    was_cut = False
    log_file = folder / "log"
    with log_file.open("a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | OFFLINE, cwd=REPOSITORY)
        while process.poll() is None and time.monotonic() < until:
            if cut is not None and not was_cut:
                was_cut = cut(folder)
            time.sleep(POLL_S)
    late = process.poll() is None
    # Also after an ordinary end: a launcher that was killed leaves its ranks.
    end_descendants((), limit_s=KILL_LIMIT_S)
    text = log_file.read_text(errors="replace").replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.strip()]
    if late and not was_cut:
        raise RuntimeError(f"did not end in {TIMES_SLOWER * limit_s:.0f} s; the last line of {log_file}: {lines[-1:]}")
    if process.returncode and not was_cut:
        raise RuntimeError(f"{_error_of(lines, process.returncode)} ({log_file})")
    return RecipeRun(
        folder=folder,
        records=_records(folder),
        lines=[line for line in lines if line.startswith("hfscale:")],
        seconds=time.monotonic() - begun,
    )


def _records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "scaling.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _error_of(lines: list[str], code: int) -> str:
    """Return the line of a log that says most about a failure: hfscale's own, else the last one of an error."""
    for wanted in ("hfscale: error", "Error: ", "error"):
        for line in reversed(lines):
            # torch's launcher ends each failure with this line, which says nothing of its cause.
            if wanted in line and "ChildFailedError" not in line and "To enable traceback" not in line:
                return line.strip()
    return f"exit code {code}"
