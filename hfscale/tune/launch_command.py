"""Reads the launch command of a recipe, `accelerate launch … recipes/…/train.py …`, as what it asks to be planned."""

import ast
import contextlib
import io
import os
import re
import shlex
from argparse import REMAINDER, ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.commands.config.config_args import default_yaml_config_file
from accelerate.commands.launch import launch_command_parser
from transformers import TrainingArguments

from hfscale.core.flags import read_yaml, read_yaml_mapping, split_off_config
from hfscale.core.spelling import spelled
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
_ACCELERATE = ("accelerate-launch", "accelerate.commands.launch")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_MEASURING = ("ScalingCallback", "ScalingMetricsCallback")
"""Callbacks that write the measurements; a script that is no recipe must have one of them."""
_WITH_DEFAULTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "torch_compile",
)
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
    own_model: str | None = None
    """The model to plan for, of a script that is no recipe; None for recipes, whose flags name it."""
    own_seq_len: int | None = None
    """Tokens per sequence of such a script."""

    @property
    def is_recipe(self) -> bool:
        """Whether the script is a recipe, or a copy of one, and not another script with a Trainer."""
        return self.own_model is None

    @property
    def model(self) -> str | ModelShape:
        """The model to plan for: a name, or the shape of the embedded default model."""
        if self.own_model is not None:
            return self.own_model
        name: str | None = self.flags.model_name_or_path or self.flags.config_name
        if name is not None:
            return name
        from hfscale.recipe import corpus

        return ModelShape.from_config(corpus.default_config(corpus.default_tokenizer()).to_dict())

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        if self.own_seq_len is not None:
            return self.own_seq_len
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
        known = {trainer: own for own, trainer in TRAINER_OPTIMIZERS.items()}
        if name not in known:
            raise UsageError(
                f"--optim is {name}, which the planner does not know: use one of {', '.join(known)}"
            )
        return known[name]  # type: ignore[return-value]

    def precision(self, *, has_bf16: bool) -> Precision:
        """Return the format of the matrix products.

        Args:
            has_bf16 (`bool`): whether the device supports bf16, which is then the default.
        """
        if self.flags.fp16:
            return "fp16"
        if not self.is_recipe:
            return "bf16" if self.flags.bf16 else "fp32"
        return "bf16" if has_bf16 and self.flags.bf16 is not False else "fp32"

    @property
    def kept_values(self) -> dict[str, Any]:
        """The given flags without those that a layout decides."""
        return {name: value for name, value in self.values.items() if name not in OF_THE_LAYOUT}


def read_command(
    words: Sequence[str], *, model: str | None = None, seq_len: int | None = None
) -> RecipeCommand:
    """Read the launch command of a recipe, or of a script whose flags are those of `TrainingArguments`.

    Args:
        words (`Sequence[str]`): the command, one word per element.
        model (`str`, *optional*): the model to plan for where the script is no recipe.
        seq_len (`int`, *optional*): tokens per sequence there.

    Raises:
        UsageError: it is not a command of `accelerate launch` or `torchrun` on one machine, its script is not a
            recipe, or a value is wrong.
        ConfigFileError: a config file cannot be read.
    """
    launch = _parse_launcher(words)
    script = Path(launch.training_script)
    if not script.is_file():
        raise UsageError(f"the recipe {script} is not a file: give its path, as in {_EXAMPLE}")
    text = script.read_text(encoding="utf-8", errors="replace")
    if "hfscale.recipe" not in text or "parse_arguments" not in text:
        return _of_own_script(launch, text, model, seq_len)
    if model is not None or seq_len is not None:
        both = f"{spelled('model')} and {spelled('seq_len')}"
        raise UsageError(
            f"{both} are for other scripts: the flags of the recipe {script} name them"
        )
    rest, config = split_off_config(launch.training_script_args)
    values = (read_yaml_mapping(config, None) if config else {}) | values_of(rest)
    task = _task(text)
    if task != "text" and not values.keys() & {"model_name_or_path", "config_name"}:
        raise UsageError(
            f"{script} needs the model to plan for: give --model_name_or_path or --config_name"
        )
    return RecipeCommand(
        script=script,
        processes=_processes(launch),
        launcher=_passed_on(launch),
        values=values,
        flags=_flags(task, values),
        task=task,
    )


def _of_own_script(
    launch: Namespace, text: str, model: str | None, seq_len: int | None
) -> RecipeCommand:
    """Return the command of a script that is no recipe; its flags are those of `TrainingArguments`, and its own."""
    script = Path(launch.training_script)
    if not any(name in text for name in _MEASURING):
        raise UsageError(
            f"{script} is neither a recipe of hfscale nor a script with {_MEASURING[0]}, whose log is read: add the "
            "callback to its Trainer"
        )
    if model is None or seq_len is None:
        raise UsageError(
            f"{script} is no recipe of hfscale, so its flags do not tell what to plan for: give --model and --seq-len"
        )
    values = values_of(launch.training_script_args)
    # The defaults of transformers, where a recipe has others.
    defaults = {
        field.name: field.default
        for field in fields(TrainingArguments)
        if field.name in _WITH_DEFAULTS
    }
    return RecipeCommand(
        script=script,
        processes=_processes(launch),
        launcher=_passed_on(launch),
        values=values,
        flags=_flags("text", {"config_name": model, **defaults, **values}),
        task="text",
        own_model=model,
        own_seq_len=seq_len,
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
            found[name] = (
                word
                if earlier is True
                else [*(earlier if isinstance(earlier, list) else [earlier]), word]
            )
    return found


def _parse_launcher(words: Sequence[str]) -> Namespace:
    """Read the launcher's part of a command: `accelerate launch` or `torchrun`, by a path or as a module of Python.

    A command of torchrun is read as one of `accelerate launch` with as many processes, which runs the configurations.
    """
    words = list(words)
    name = Path(words[0]).name if words else ""
    if re.fullmatch(r"python[\d.]*", name) and words[1:2] == ["-m"] and len(words) > 2:
        name, rest = words[2], words[3:]
    else:
        rest = words[1:]
    if name in _ACCELERATE or (
        name in ("accelerate", "accelerate.commands.accelerate_cli") and rest[:1] == ["launch"]
    ):
        return _parse_launch(rest if name in _ACCELERATE else rest[1:])
    if name in _TORCHRUN:
        return _parse_launch(_as_accelerate(rest))
    given = f"it is {shlex.join(words[:4])!r}" if words else "it is missing"
    raise UsageError(
        f"give the launch command of a recipe after --, by accelerate launch or torchrun, such as {_EXAMPLE}; {given}"
    )


def _as_accelerate(words: Sequence[str]) -> list[str]:
    """Return the arguments of `accelerate launch` for those of torchrun on one machine."""
    parser = ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", dest="processes", default="1")
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--standalone", action="store_true")
    for flag in (
        "rdzv-backend",
        "rdzv-endpoint",
        "rdzv-id",
        "master-addr",
        "master-port",
        "node-rank",
        "max-restarts",
    ):
        parser.add_argument(f"--{flag}", f"--{flag.replace('-', '_')}")
    parser.add_argument("script", nargs=REMAINDER)
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            found = parser.parse_args(list(words))
    except (ArgumentError, SystemExit) as error:
        reason = messages.getvalue().strip().rpartition("error: ")[2] or str(error)
        raise UsageError(f"hfscale tune cannot read this command of torchrun: {reason}") from None
    if found.nnodes not in ("1", "1:1"):
        raise UsageError(
            f"the launch command is for {found.nnodes} machines: tune on one of them, with --nnodes 1"
        )
    counts = {
        "gpu": torch.cuda.device_count(),
        "auto": torch.cuda.device_count() or os.cpu_count(),
        "cpu": os.cpu_count(),
    }
    processes = counts.get(found.processes, found.processes)
    if not str(processes).isdecimal() or int(str(processes)) < 1:
        raise UsageError(f"--nproc-per-node is {found.processes}: give the number of processes")
    return ["--num_processes", str(processes), *found.script]


def _parse_launch(words: Sequence[str]) -> Namespace:
    """What accelerate reads from its own flags; its message as a UsageError where it would exit."""
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            launch: Namespace = launch_command_parser().parse_args(list(words))
    except SystemExit:
        lines = messages.getvalue().strip().splitlines() or ["accelerate prints its help"]
        raise UsageError(
            f"accelerate refuses the launch command: {lines[-1].partition('error: ')[2]}"
        ) from None
    return launch


def _task(text: str) -> Task:
    if re.search(r"""task=["']vision["']""", text):
        raise UsageError(
            "a recipe for images is not tuned: how long a step takes depends on the images; use hfscale plan --task "
            "vision"
        )
    found = re.search(r"\b(SFT|DPO|GRPO)Trainer\b", text)
    task: Task = found[1].lower() if found else "text"  # type: ignore[assignment]
    if task == "grpo":
        raise UsageError(
            "GRPO is not tuned: how long a step generates depends on the prompts; use hfscale plan"
        )
    other = _trainer_of_trl(text)
    if task == "text" and other is not None:
        raise UsageError(
            f"{other} is not tuned, of TRL's trainers only SFTTrainer and DPOTrainer are: choose the batch by hand"
        )
    return task


def _trainer_of_trl(text: str) -> str | None:
    """Return the first trainer that a script imports from TRL; None if it imports none."""
    try:
        nodes = ast.walk(ast.parse(text))
    except SyntaxError:
        return None  # which the launch shows
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
            for alias in node.names:
                if alias.name.endswith("Trainer"):
                    return alias.name
    return None


def _flags(task: Task, values: Mapping[str, Any]) -> Namespace:
    return read_flags(values, task=task, also=[ParallelArguments] if task == "text" else [])


def _processes(launch: Namespace) -> int:
    """The number of processes: the flag, the config file, or as accelerate decides it, all GPUs or one process."""
    file = launch.config_file or (
        default_yaml_config_file if Path(default_yaml_config_file).is_file() else None
    )
    config = read_yaml(str(file), "--config_file") if file else {}
    config = config if isinstance(config, dict) else {}
    machines = launch.num_machines or config.get("num_machines") or 1
    if machines != 1:
        raise UsageError(
            f"the launch command is for {machines} machines: tune on one of them, with --num_machines 1"
        )
    number: int = (
        launch.num_processes or config.get("num_processes") or max(1, torch.cuda.device_count())
    )
    return number


def _passed_on(launch: Namespace) -> list[str]:
    values = [
        (f"--{name}", getattr(launch, name)) for name in PASSED_ON if name in launch.nondefault
    ]
    return [str(word) for pair in values for word in pair]
