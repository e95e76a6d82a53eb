"""Runs a recipe's flag parser and its checks before anything is loaded, as one rank of as many as were planned.

    python start_of_plan.py MODEL LAUNCHER-WORD ...

MODEL is a folder with the model's config.json at its real size. The words are those of `accelerate launch` in an
emitted launch.sh, whose agent is replaced: this process stands for rank 0, in a process group that sends nothing.
Printed is what would be trained with.
"""

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accelerate.utils.launch
import torch
import torch.distributed as dist
import torch.distributed.run
from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from hfscale import ParallelArguments
from hfscale.core.torch_internals import FakeStore
from hfscale.parallel.arguments import check_arguments, plan_stages
from hfscale.parallel.checks import check_config
from hfscale.recipe.compatibility import check_compatibility
from hfscale.recipe.entrypoint import run
from hfscale.recipe.layout import (
    NativeParallelLayout,
    check_model,
    set_up_data_parallelism,
    set_up_parallelism,
)
from hfscale.recipe.models import load_config
from hfscale.recipe.parsing import parse_arguments
from hfscale.trainer.strategies.requested import check_launch, requested_strategy

LENGTHS = {"text": "block_size", "sft": "max_length", "dpo": "max_length", "grpo": "max_completion_length"}


def rank_0(args: Any) -> None:
    """Do in this process what the first rank that torch's agent starts would do."""
    per_node = int(args.nproc_per_node)
    world_size = per_node * int(str(args.nnodes).rpartition(":")[2])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    ranks = address | {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_node}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    start(Path(args.training_script), args.training_script_args, world_size)


def only_rank(args: Any) -> None:
    """Do the same for a launch of one process."""
    words, environment = prepare_simple_launcher_cmd_env(args)
    os.environ.update(environment)
    start(Path(words[1]), words[2:], 1)


def start(script: Path, flags: list[str], world_size: int) -> None:
    """Parse the flags of a recipe and make its checks."""
    found = re.search(r"task=\"(\w+)\"", script.read_text(encoding="utf-8"))
    task = found[1] if found else "text"
    has_axes = "also=[ParallelArguments]" in script.read_text(encoding="utf-8")
    has_stages = "ParallelTrainer(" in script.read_text(encoding="utf-8")
    also = [ParallelArguments] if has_axes else []
    model_args, data_args, _, args, *others = parse_arguments(flags, task=task, also=also)
    check_launch(args)
    stages = None
    if has_stages:
        layout, stages = plan_stages(others[0], args)
        check_compatibility(model_args, args)
        check_arguments(args, cp=layout.cp)
    elif has_axes:
        layout = set_up_parallelism(others[0], args)
        check_compatibility(model_args, args, layout)
    else:
        layout = set_up_data_parallelism(args, trl=task != "text")
        check_compatibility(model_args, args, layout)
    args.check_method(model_args)
    # The model's name is that of the hub; its config is read from the folder.
    model_args.model_name_or_path = sys.argv[1]
    model_args.config_name = None
    tokens = getattr(data_args if task == "text" else args, LENGTHS[task])
    config = load_config(model_args, None, block_size=tokens, length_flag=f"--{LENGTHS[task]}")
    if stages is not None:
        parallel = others[0]
        split = {"sequence_parallel": parallel.sequence_parallel, "checks_parity": parallel.check_parity}
        check_config(config, layout, stages, **split)
    else:
        check_model(layout, config, args, block_size=tokens)
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * layout.data_parallel_size
    is_native = isinstance(layout, NativeParallelLayout) and layout.tp == 1
    strategy = "native" if is_native else requested_strategy(args)
    result = {"layout": asdict(layout), "strategy": strategy, "world_size": world_size, "batch": batch}
    sys.stdout.write(json.dumps(result) + "\n")


def main() -> None:
    """Launch."""
    torch.distributed.run.run = rank_0
    launch.simple_launcher = only_rank
    accelerate.utils.launch.is_port_in_use = lambda _: False  # nothing is bound here, and another test may use it
    launch.launch_command(launch.launch_command_parser().parse_args(sys.argv[2:]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(main)
