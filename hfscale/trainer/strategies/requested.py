"""What the launcher and the arguments of a training request, before there is a model.

transformers and Accelerate silently turn several requests into something else: FSDP and DeepSpeed into DDP on a CPU,
two processes into one, or into two unrelated trainings that write one directory. So `Strategy.check` compares what
runs with what is requested here.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hfscale.errors import StrategyMismatchError
from hfscale.facts.support import Combination, check_support

if TYPE_CHECKING:
    from transformers import TrainingArguments

_TRUE = ("1", "true", "yes", "on", "y", "t")


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in _TRUE


def requested_family(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> str:
    """Return the family of strategies that the launcher and the arguments request.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Returns:
        `str`: `zero`, `fsdp`, `parallel` (with tensor parallelism), `ddp` or `single`. A script that loads its model
            with `distributed_config` requests `native`, which neither the launcher nor the arguments know.
    """
    if args.deepspeed or _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return "zero"
    if args.fsdp or _is_set(environ, "ACCELERATE_USE_FSDP"):
        return "fsdp"
    if int(environ.get("PARALLELISM_CONFIG_TP_SIZE", "1")) > 1:
        return "parallel"
    return "ddp" if int(environ.get("WORLD_SIZE", "1")) > 1 else "single"


def requested_strategy(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> str:
    """Return the strategy that the launcher and the arguments request, by its name in a checkpoint's manifest.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Returns:
        `str`: one of the names of `hfscale.facts.strategies`.
    """
    family = requested_family(args, environ)
    if family == "zero":
        # Accelerate or transformers makes it from the request
        assert args.deepspeed_plugin is not None
        return f"zero{args.deepspeed_plugin.zero_stage}"
    return f"fsdp{environ.get('FSDP_VERSION', '2')}" if family == "fsdp" else family


def compiles_full_model(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch.compile compiles the full model, and not each of its layers.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, from which Accelerate reads it.
    """
    return bool(args.torch_compile) and not _is_set(
        environ, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
    )


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
    if _is_set(environ, "ACCELERATE_USE_MEGATRON_LM"):
        # Accelerate would give the Trainer a model it cannot step
        check_support(Combination(strategy="megatron_lm"))
    launched = int(environ.get("WORLD_SIZE", "1"))
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
