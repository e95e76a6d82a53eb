"""States in the header of each recipe's YAML the speed that the planner predicts for it.

    python -m benchmarks.recipe_speed            # name the headers that differ from the prediction
    python -m benchmarks.recipe_speed --write    # and write them

A YAML names its launch command, and in its second line the memory of its GPUs, for which `GPUS` has a type. Predicted
is what the recipe does by default: a fused loss where it can, and compiled layers for plain text (with conversations,
they are compiled only where FlashAttention is not installed, which no GPU has measured); and, if that is slower, a
loss from all logits without torch.compile. ZeRO-3 is predicted as FSDP2. There is no prediction for GRPO, whose steps
depend on the lengths of prompts and completions.
"""

import argparse
import json
import re
import shlex
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hfscale.facts.hardware import accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.models import find_model
from hfscale.facts.schedules import PLANNER_SCHEDULES, schedule_name
from hfscale.parallel.arguments import decide_layout
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.job import Job, splits_activations
from hfscale.planner.launchable import can_fuse_loss, chunks_loss, compiles_by_default
from hfscale.tune.launch_command import RecipeCommand, read_command

REPOSITORY = Path(__file__).parents[1]
GPUS = {24: "RTX4090", 40: "A100-40GB", 48: "L40S", 80: "H100-80GB"}
"""Memory of a GPU in GB, as the second line of a YAML gives it -> the type that is predicted for."""
TEXTS = ("HuggingFaceFW/fineweb-edu", "wikimedia/wikipedia")
"""Data sets of plain text; the others are conversations, which are packed with attention that is cut between them."""
WIDTH = 119
_START = "# Speed, predicted and not measured: "
_STATED = re.compile(rf"{re.escape(_START)}.*\n(?:#   .*\n)*")
_BEFORE = re.compile(r"^# Learning rate", re.MULTILINE)


def recipes() -> list[Path]:
    """Return the YAML files for which there is a prediction: generation is not planned, no teacher, no tower."""
    yamls = sorted((REPOSITORY / "recipes").rglob("*.yaml"))
    return [path for path in yamls if path.parent.name not in ("grpo", "distillation", "vision")]


def job_of(path: Path) -> Job:
    """Return the run of a recipe's YAML, with a loss from all logits and without torch.compile.

    Args:
        path (`Path`): the YAML.
    """
    command_line, summary = path.read_text(encoding="utf-8").splitlines()[:2]
    words = shlex.split(command_line.removeprefix("# "))
    command = read_command(words)
    launcher = yaml.safe_load(Path(words[words.index("--config_file") + 1]).read_text(encoding="utf-8"))
    layout, zero = _layout(command, launcher)
    flags = vars(command.flags)
    stages = flags.get("virtual_stages") or 1
    schedule = flags.get("pipeline_schedule", "1F1B")
    gpu = re.search(r"(\d+) GB", summary)
    assert gpu is not None, f"{path}: the second line names no GPU"
    checkpointing = flags["activation_checkpointing"] or (
        command.task != "text" and flags["activation_checkpointing"] is None
    )
    return Job(
        shape=find_model(flags["model_name_or_path"] or flags["config_name"]),
        gpu=accelerator(GPUS[int(gpu[1])]),
        layout=layout,
        seq_len=command.seq_len,
        micro_batch=flags["per_device_train_batch_size"],
        global_batch=flags["per_device_train_batch_size"]
        * flags["gradient_accumulation_steps"]
        * layout.data_parallel_size,
        zero=zero,
        expert_parallel=flags.get("ep_size") or 1,
        activation_checkpointing=flags["recompute"] if checkpointing else "none",
        method=command.method,
        lora_rank=flags["lora_r"],
        optimizer=command.optimizer,
        task=command.task,
        precompute_ref_log_probs=bool(flags.get("precompute_ref_log_probs")),
        schedule=next(name for name in PLANNER_SCHEDULES if schedule_name(name, stages) == schedule),
        virtual_stages=stages,
        reshard=launcher.get("fsdp_config", {}).get("fsdp_reshard_after_forward", True),
        sequence_parallel=bool(flags.get("sequence_parallel")),
        loss_parallel=splits_activations("hf", layout),
    )


def _layout(command: RecipeCommand, launcher: dict[str, Any]) -> tuple[ParallelLayout, int]:
    """Return the layout that a command launches, and its ZeRO stage."""
    flags = vars(command.flags)
    processes = command.processes
    kind = launcher["distributed_type"]
    is_native = bool(flags.get("ep_size") or flags.get("fsdp_size"))
    if kind == "MULTI_GPU" and not flags.get("pp_size") and not is_native:
        return ParallelLayout(dp_replicate=processes), 0
    if kind == "DEEPSPEED":
        path = Path(launcher["deepspeed_config"]["deepspeed_config_file"])
        zero = json.loads(path.read_text(encoding="utf-8"))["zero_optimization"]["stage"]
        if zero < 3:
            return ParallelLayout(dp_replicate=processes), zero
    names = ("tp", "pp", "cp", "dp_shard", "dp_replicate")
    sizes = {name: flags.get(f"{name}_size") for name in names}
    sizes["dp_shard"] = sizes["dp_shard"] or flags.get("fsdp_size")
    return decide_layout(processes, **sizes), 3


def as_the_recipe(job: Job, *, is_text: bool) -> Job:
    """Return the job with the fused loss and the compiled layers that its recipe has by default.

    Args:
        job (`Job`): a run with neither.
        is_text (`bool`): whether it trains on plain text.
    """
    if can_fuse_loss(job):
        job = replace(job, liger=True, chunked_loss=chunks_loss(job))
    return replace(job, compile=is_text and compiles_by_default(job))


def statement(path: Path) -> str:
    """Return the lines of the header of a YAML that state its speed.

    Args:
        path (`Path`): the YAML.
    """
    plain = job_of(path)
    is_text = yaml.safe_load(path.read_text(encoding="utf-8")).get("dataset_name") in TEXTS
    chosen = as_the_recipe(plain, is_text=is_text)
    gained = ["a fused loss"] * chosen.liger + ["compiled layers"] * chosen.compile
    text = f"{_START}{_speed(estimate_job(chosen))} on {plain.layout.world_size} x {plain.gpu.name}"
    if gained:
        text += f" with {' and '.join(gained)}"
    without = _mfu(estimate_job(plain))
    if without != _mfu(estimate_job(chosen)):
        text += f", {without} without"
    text += "."
    return textwrap.fill(text, WIDTH, subsequent_indent="#   ", break_on_hyphens=False) + "\n"


def _mfu(estimate: Estimate) -> str:
    assert estimate.mfu is not None  # the peaks of all GPUS are known
    return f"{estimate.mfu:.0%} MFU"


def _speed(estimate: Estimate) -> str:
    """MFU and tokens/s, to two digits."""
    return f"{_mfu(estimate)}, {float(f'{estimate.tokens_per_s_per_gpu:.2g}'):,.0f} tokens/s per GPU"


def with_statement(path: Path) -> str:
    """Return the text of a YAML with the statement, before what it says about the learning rate.

    Args:
        path (`Path`): the YAML.
    """
    text = _STATED.sub("", path.read_text(encoding="utf-8"))
    return _BEFORE.sub(lambda found: statement(path) + found[0], text, count=1)


def main() -> int:
    """Compare or write the headers; return 1 if one differs and is not written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe_speed")
    parser.add_argument("--write", action="store_true", help="write the headers")
    arguments = parser.parse_args()
    differ = {path: text for path in recipes() if (text := with_statement(path)) != path.read_text(encoding="utf-8")}
    for path, text in differ.items():
        print(path.relative_to(REPOSITORY))
        if arguments.write:
            path.write_text(text, encoding="utf-8")
    return 1 if differ and not arguments.write else 0


if __name__ == "__main__":
    sys.exit(main())
