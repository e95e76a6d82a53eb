"""What the launcher and the arguments of a training request, before there is a model.

transformers and Accelerate silently turn several requests into something else: FSDP and DeepSpeed into DDP on a CPU,
two processes into one, or into two unrelated trainings that write one directory. So `Strategy.check` compares what
runs with what is requested here.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hfscale.core.launch_variables import launch_number
from hfscale.errors import StrategyMismatchError
from hfscale.facts.strategies import STRATEGIES, StrategyFacts
from hfscale.facts.support import Combination, check_support

if TYPE_CHECKING:
    from transformers import TrainingArguments

_TRUE = ("1", "true", "yes", "on", "y", "t")
_SIZE = "PARALLELISM_CONFIG_{}_SIZE"
"""Where `accelerate launch` puts the sizes of a config's `parallelism_config`."""


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a variable of the launcher is true.

    Args:
        environ (`Mapping[str, str]`): the environment variables.
        name (`str`): the name of the variable.
    """
    return environ.get(name, "").lower() in _TRUE


def requested(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> StrategyFacts:
    """Return the strategy that the launcher and the arguments request.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Returns:
        `StrategyFacts`: that of `parallel` with tensor parallelism. A script that loads its model with
            `distributed_config` requests `native`, which neither the launcher nor the arguments know.
    """
    name = requested_strategy(args, environ)
    return STRATEGIES[name]


def requested_strategy(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the strategy that the launcher and the arguments request, as a checkpoint's manifest has it.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.
    """
    if args.deepspeed or is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        config = deepspeed_config(args.deepspeed_plugin)
        return f"zero{stage_of(config)}"
    if args.fsdp or is_set(environ, "ACCELERATE_USE_FSDP"):
        version = environ.get("FSDP_VERSION", "2")
        return f"fsdp{version}"
    ranks_of_matrix = launched_size("tp", environ) or 1
    if ranks_of_matrix > 1:
        return "parallel"
    processes = launch_number("WORLD_SIZE", 1, environ)
    if processes > 1:
        return "ddp"
    return "single"


def deepspeed_config(plugin: Any) -> dict[str, Any]:
    """Return the config of DeepSpeed, with the values that transformers fills in for `auto`.

    Args:
        plugin (`DeepSpeedPlugin`, *optional*): Accelerate's, which it or transformers makes from the request; None in
            arguments that were made before the request.
    """
    if plugin is None:
        return {}
    config: dict[str, Any] = plugin.hf_ds_config.config
    return config


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO; DeepSpeed's own default is 0, where that of Accelerate's plugin is 2.

    Args:
        config (`Mapping[str, Any]`): the config of DeepSpeed.
    """
    zero = config.get("zero_optimization", {})
    return int(zero.get("stage", 0))


def launched_size(axis: str, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the size of an axis in the launcher's config; None if it has none.

    Args:
        axis (`str`): its name in `ParallelismConfig`, such as `tp` or `dp_shard`.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.
    """
    name = _SIZE.format(axis.upper())
    size = environ.get(name)
    if not size:
        return None
    return int(size)


def gradient_compression(args: "TrainingArguments") -> str:
    """Return how DDP's gradients are compressed, a value of `--gradient_compression` of the recipes.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.

    Returns:
        `str`: `none` where the arguments have no such flag.
    """
    method: str = vars(args).get("gradient_compression", "none")
    return method


def check_launch(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> None:
    """Compare the number of processes with the number that the launcher started. It needs no model.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Raises:
        StrategyMismatchError: the launcher started another number of processes than this run has, one process would
            train on several GPUs, or the launcher requests Megatron-LM, which transformers' Trainer does not support.
    """
    if is_set(environ, "ACCELERATE_USE_MEGATRON_LM"):
        # Accelerate would give the Trainer a model it cannot step
        check_support(Combination(strategy="megatron_lm"))
    launched = launch_number("WORLD_SIZE", 1, environ)
    if launched != args.world_size:
        raise StrategyMismatchError(
            f"the launcher started {launched} processes but each of them trains alone (world size {args.world_size}): "
            "on a machine without GPUs pass --use_cpu true, or TrainingArguments(use_cpu=True)"
        )
    # accelerate's launcher of single processes exports MASTER_ADDR when its config asks for several, then starts one.
    by_single_launcher = "ACCELERATE_USE_CPU" in environ and "ACCELERATE_MIXED_PRECISION" in environ
    if by_single_launcher and "MASTER_ADDR" in environ and "WORLD_SIZE" not in environ:
        raise StrategyMismatchError(
            "the accelerate config asks for several CPU processes but its launcher started one: "
            "use distributed_type MULTI_GPU with use_cpu false, which starts them on a CPU machine too"
        )
    # More than 1 only in a single process whose model is on one GPU: Trainer sets 1 for a `device_map` over several.
    if args.n_gpu > 1:
        raise StrategyMismatchError(
            f"{args.n_gpu} GPUs are visible and 1 process was started, which Trainer would turn into nn.DataParallel "
            f"with {args.n_gpu} times the batch: start a process per GPU (accelerate launch --num_processes "
            f"{args.n_gpu}), or set CUDA_VISIBLE_DEVICES=0 to train on one"
        )
