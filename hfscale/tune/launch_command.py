"""Reads the launch command of a recipe, `accelerate launch … recipes/…/train.py …`, as what it asks to be planned."""

import contextlib
import io
import re
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.commands.config.config_args import default_yaml_config_file
from accelerate.commands.launch import launch_command_parser

from hfscale.core.flags import read_yaml, read_yaml_mapping, split_off_config
from hfscale.errors import UsageError
from hfscale.facts.model_shape import ModelShape
from hfscale.parallel.arguments import ParallelArguments
from hfscale.planner.launchable import TRAINER_OPTIMIZERS
from hfscale.planner.options import Method, Optimizer, Precision, Task
from hfscale.recipe.parsing import read_flags

PASSED_ON = ("gpu_ids", "num_cpu_threads_per_process", "main_process_port")
"""Flags of `accelerate launch` that hold for every layout."""
OF_THE_LAYOUT = (
    *(field.name for field in fields(ParallelArguments)),
    *("deepspeed", "fsdp", "fsdp_config", "accelerator_config"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("gradient_checkpointing", "activation_checkpointing", "recompute"),
)
"""Flags of a recipe that a layout decides."""
SHIPPED_TIERS = ("ddp", "sharded", "tp_pp")
"""Folders of the recipes for text; each runs other layouts."""
_EXAMPLE = "accelerate launch --num_processes 2 recipes/ddp/train.py"


@dataclass(frozen=True, kw_only=True)
class RecipeCommand:
    """Describes the launch command of a recipe."""

    script: Path
    """The training script."""
    processes: int
    """Number of processes, on one machine."""
    launcher: Sequence[str]
    """Its flags of `accelerate launch` that hold for every layout."""
    values: Mapping[str, Any]
    """The flags of the recipe that are given, on the command line or in `--config`."""
    flags: Namespace
    """All flags of the recipe, with the defaults."""
    task: Task
    """What a step trains on."""

    @property
    def model(self) -> str | ModelShape:
        """The model to plan for: a name, or the shape of the embedded default model."""
        name: str | None = self.flags.model_name_or_path or self.flags.config_name
        if name is not None:
            return name
        from hfscale.recipe import corpus

        return ModelShape.from_config(corpus.default_config(corpus.default_tokenizer()).to_dict())

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        length: int = self.flags.block_size if self.task == "text" else self.flags.max_length
        return length

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        flags = self.flags
        sizes = (flags.tp_size, flags.pp_size, flags.cp_size) if self.task == "text" else ()
        others = 1
        for size in sizes:
            others *= size or 1
        ranks = max(1, self.processes // others)
        return int(flags.per_device_train_batch_size * flags.gradient_accumulation_steps * ranks)

    @property
    def method(self) -> Method:
        """Which parameters train."""
        if self.flags.load_in_4bit:
            return "qlora"
        return "lora" if self.flags.use_peft else "full"

    @property
    def optimizer(self) -> Optimizer:
        """The planner's name of the optimizer.

        Raises:
            UsageError: the planner does not know the optimizer.
        """
        name = str(getattr(self.flags.optim, "value", self.flags.optim))
        known = {trainer: own for own, trainer in TRAINER_OPTIMIZERS.items()} | {"adamw_torch": "adamw"}
        if name not in known:
            raise UsageError(f"--optim is {name}, which the planner does not know: use one of {', '.join(known)}")
        return known[name]  # type: ignore[return-value]

    def precision(self, *, has_bf16: bool) -> Precision:
        """Return the format of the matrix products.

        Args:
            has_bf16 (`bool`): whether the device supports bf16, which is then the default.
        """
        if self.flags.fp16:
            return "fp16"
        return "bf16" if has_bf16 and self.flags.bf16 is not False else "fp32"

    @property
    def kept_values(self) -> dict[str, Any]:
        """The given flags without those that a layout decides."""
        return {name: value for name, value in self.values.items() if name not in OF_THE_LAYOUT}


def read_command(words: Sequence[str]) -> RecipeCommand:
    """Read the launch command of a recipe.

    Args:
        words (`Sequence[str]`): the command, one word per element.

    Raises:
        UsageError: it is not a command of `accelerate launch` on one machine, its script is not a recipe, or a value
            is wrong.
        ConfigFileError: a config file cannot be read.
    """
    starts = [words[: len(start)] == start for start in (["accelerate", "launch"], ["accelerate-launch"])]
    if not any(starts):
        given = f"it is {shlex.join(words[:4])!r}" if words else "it is missing"
        raise UsageError(f"give the launch command of a recipe after --, such as {_EXAMPLE}; {given}")
    launch = _parse_launch(words[2 if starts[0] else 1 :])
    script = Path(launch.training_script)
    if not script.is_file():
        raise UsageError(f"the recipe {script} is not a file: give its path, as in {_EXAMPLE}")
    text = script.read_text(encoding="utf-8", errors="replace")
    if "hfscale.recipe" not in text or "parse_arguments" not in text:
        raise UsageError(f"{script} is neither a recipe of hfscale nor a copy of one: give one, as in {_EXAMPLE}")
    rest, config = split_off_config(launch.training_script_args)
    values = (read_yaml_mapping(config, None) if config else {}) | values_of(rest)
    task = _task(text)
    if task != "text" and not values.keys() & {"model_name_or_path", "config_name"}:
        raise UsageError(f"{script} needs the model to plan for: give --model_name_or_path or --config_name")
    return RecipeCommand(
        script=script,
        processes=_processes(launch),
        launcher=_passed_on(launch),
        values=values,
        flags=_flags(task, values),
        task=task,
    )


def values_of(argv: Sequence[str]) -> dict[str, Any]:
    """Convert the flags of a command line to a mapping: a flag without a value is true, several values are a list.

    Args:
        argv (`Sequence[str]`): the flags, without `--config`.

    Raises:
        UsageError: a value belongs to no flag.
    """
    found: dict[str, Any] = {}
    name = None
    for word in argv:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value if has_value else True
        elif name is None:
            raise UsageError(f"'{word}' is not a flag and belongs to none: flags begin with --")
        else:
            earlier = found[name]
            found[name] = word if earlier is True else [*(earlier if isinstance(earlier, list) else [earlier]), word]
    return found


def _parse_launch(words: Sequence[str]) -> Namespace:
    """What accelerate reads from its own flags; its message as a UsageError where it would exit."""
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            launch: Namespace = launch_command_parser().parse_args(list(words))
    except SystemExit:
        lines = messages.getvalue().strip().splitlines() or ["accelerate prints its help"]
        raise UsageError(f"accelerate refuses the launch command: {lines[-1].partition('error: ')[2]}") from None
    return launch


def _task(text: str) -> Task:
    found = re.search(r"\b(SFT|DPO|GRPO)Trainer\b", text)
    task: Task = found[1].lower() if found else "text"  # type: ignore[assignment]
    if task == "grpo":
        raise UsageError("GRPO is not tuned: how long a step generates depends on the prompts; use hfscale plan")
    return task


def _flags(task: Task, values: Mapping[str, Any]) -> Namespace:
    return read_flags(values, task=task, also=[ParallelArguments] if task == "text" else [])


def _processes(launch: Namespace) -> int:
    """The number of processes: the flag, the config file, or as accelerate decides it, all GPUs or one process."""
    file = launch.config_file or (default_yaml_config_file if Path(default_yaml_config_file).is_file() else None)
    config = read_yaml(str(file), "--config_file") if file else {}
    config = config if isinstance(config, dict) else {}
    machines = launch.num_machines or config.get("num_machines") or 1
    if machines != 1:
        raise UsageError(f"the launch command is for {machines} machines: tune on one of them, with --num_machines 1")
    number: int = launch.num_processes or config.get("num_processes") or max(1, torch.cuda.device_count())
    return number


def _passed_on(launch: Namespace) -> list[str]:
    values = [(f"--{name}", getattr(launch, name)) for name in PASSED_ON if name in launch.nondefault]
    return [str(word) for pair in values for word in pair]
