"""The strategy that runs, the strategy that was asked for, and one clear error when they differ.

transformers and accelerate turn several requests into something else without a word: FSDP and DeepSpeed into DDP on
a CPU, two processes into one, or into two unrelated trainings that write one directory.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hfscale.errors import StrategyMismatchError

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

_TRUE = ("1", "true", "yes", "on", "y", "t")


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in _TRUE


def requested_family(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> str:
    """What the launcher and the arguments ask for: `zero`, `fsdp`, `ddp` or `single`."""
    if args.deepspeed or _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return "zero"
    if args.fsdp or _is_set(environ, "ACCELERATE_USE_FSDP"):
        return "fsdp"
    return "ddp" if int(environ.get("WORLD_SIZE", "1")) > 1 else "single"


def running_strategy(trainer: "Trainer") -> str:
    """What accelerate set up: `single`, `ddp`, `fsdp1`, `fsdp2`, `zero0` … `zero3` (as in a checkpoint's manifest)."""
    state = trainer.accelerator.state
    if state.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{state.deepspeed_plugin.zero_stage}"
    if state.distributed_type == DistributedType.FSDP:
        return f"fsdp{state.fsdp_plugin.fsdp_version}"
    return "ddp" if trainer.args.world_size > 1 else "single"


def check_launch(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> None:
    """Compare the number of processes with what the launcher started. Needs no model.

    Raises:
        StrategyMismatchError: the launcher started another number of processes than this run has.
    """
    launched = int(environ.get("WORLD_SIZE", "1"))
    if launched != args.world_size:
        raise StrategyMismatchError(
            f"the launcher started {launched} processes but each of them trains alone (world size {args.world_size}): "
            "on a machine without GPUs pass --use_cpu true"
        )
    # accelerate's launcher of single processes exports MASTER_ADDR when its config asks for several, then starts one.
    by_single_launcher = "ACCELERATE_USE_CPU" in environ and "ACCELERATE_MIXED_PRECISION" in environ
    if by_single_launcher and "MASTER_ADDR" in environ and "WORLD_SIZE" not in environ:
        raise StrategyMismatchError(
            "the accelerate config asks for several CPU processes but its launcher started one: "
            "use distributed_type MULTI_GPU with use_cpu false, which starts them on a CPU machine too"
        )


def check_strategy(trainer: "Trainer", environ: Mapping[str, str] = os.environ) -> str:
    """Compare the wrapped model with the request, once training is prepared; returns the running strategy.

    Raises:
        StrategyMismatchError: another strategy was set up, or the model is not wrapped for it.
    """
    asked, runs = requested_family(trainer.args, environ), running_strategy(trainer)
    if not runs.startswith(asked):
        mend = {
            "zero": "unset ACCELERATE_USE_CPU, and on a machine without GPUs pass --use_cpu true",
            "fsdp": "accelerate runs FSDP on accelerators only; on a machine without GPUs use DDP or ZeRO",
        }.get(asked, "check the --config_file given to accelerate launch")
        raise StrategyMismatchError(f"{asked.upper()} was asked for but {runs.upper()} would run: {mend}")
    wrapper = _unwrap_compiled(trainer.model_wrapped)
    if not _wraps(runs, wrapper):
        raise StrategyMismatchError(
            f"{runs.upper()} was asked for but the model is a bare {type(wrapper).__name__}: "
            "let the Trainer wrap the model itself"
        )
    return runs


def _unwrap_compiled(module: object) -> object:
    return getattr(module, "_orig_mod", module)


def _wraps(strategy: str, module: object) -> bool:
    if strategy == "single":
        return True
    if strategy == "ddp":
        return isinstance(module, DistributedDataParallel)
    if strategy == "fsdp2":
        return isinstance(module, FSDPModule)
    if strategy.startswith("zero"):
        return type(module).__name__.endswith("Engine")  # DeepSpeedEngine, without importing deepspeed
    return True
