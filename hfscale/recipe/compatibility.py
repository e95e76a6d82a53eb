"""Combinations of model, method, strategy and machine that do not work, refused before anything is loaded."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfscale.core.logging import get_logger
from hfscale.core.versions import require
from hfscale.errors import MissingDependencyError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import Combination, check_support
from hfscale.recipe.arguments import RecipeTrainingMixin
from hfscale.recipe.layout import NativeParallelLayout, is_native
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.trainer.state import requested_optimizer
from hfscale.trainer.strategies.requested import (
    compiles_full_model,
    gradient_compression,
    requested_family,
    requested_strategy,
)

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = get_logger(__name__)

_TASKS = {"chat": "sft", "preference": "dpo", "prompt": "grpo"}
"""Kind of records of one of TRL's trainers -> its task."""


def check_compatibility(
    model_args: ModelArguments,
    training_args: RecipeTrainingMixin,
    layout: ParallelLayout | None = None,
) -> None:
    """Check that the training method, the strategy, the layout and the machine work together.

    Args:
        model_args (`ModelArguments`): the flags of the model and of the adapters.
        training_args (`RecipeTrainingMixin`): the flags of the training.
        layout (`ParallelLayout`, *optional*): the sizes of the parallel axes, if the recipe has any.

    Raises:
        UsageError: two of them exclude each other; the message names both and how to fix it.
        MissingDependencyError: a package that one of them needs is not installed.
    """
    config = _deepspeed_config(training_args)
    check_support(_describe(model_args, training_args, layout, config))
    if model_args.load_in_4bit:
        require("QLoRA", "--load_in_4bit")
    _check_nvme(config)
    check_hpz(config, os.environ)


def _describe(
    model_args: ModelArguments,
    args: RecipeTrainingMixin,
    layout: ParallelLayout | None,
    config: dict[str, Any],
) -> Combination:
    """Describe a run for the rules of `hfscale.facts.support`."""
    layout = layout or ParallelLayout()
    family = requested_family(args)
    zero = config.get("zero_optimization", {})
    # A layout with axes of its own decides over the launcher's strategy, which is then that of plain processes.
    if family in ("single", "ddp") and layout.tp > 1:
        strategy = "parallel"
    elif is_native(layout):
        strategy = "native"
    elif family == "zero":
        strategy = family
    else:
        strategy = requested_strategy(args)
    if model_args.load_in_4bit:
        method = "qlora"
    elif model_args.use_peft:
        method = "lora"
    else:
        method = "full"
    return Combination(
        engine="trainer",
        strategy=strategy,
        zero=zero.get("stage", 0) if family == "zero" else None,
        tp=layout.tp,
        cp=layout.cp,
        expert_parallel=layout.ep if isinstance(layout, NativeParallelLayout) else None,
        liger=bool(args.use_liger_kernel) or getattr(args, "fused_loss", "none") == "liger",
        method=method,
        task=_TASKS.get(args.records or "", "text"),
        compile=bool(args.torch_compile),
        compile_full=compiles_full_model(args),
        has_cuda=torch.cuda.is_available(),
        device="cpu" if args.use_cpu else "gpu",
        optimizer=requested_optimizer(args),
        compression=gradient_compression(args),
        precision=args.mixed_precision,
        deepspeed_optimizer=str(config.get("optimizer", {}).get("type", "")),
        autotp=config.get("tensor_parallel", {}).get("autotp_size", 1),
        fp32_accumulation=args.bf16 is True
        and config.get("data_types", {}).get("grad_accum_dtype") == "fp32",
        recompute=args.recompute,
        gathers_weights=bool(zero.get("stage3_gather_16bit_weights_on_model_save")),
        param_device=_device_of(config, "param"),
        attention=model_args.attn_implementation,
        launcher_attention=launcher_attention(family),
    )


def launcher_attention(family: str) -> str:
    """Return the attention with which the launcher splits sequences over ranks.

    Args:
        family (`str`): the family of strategies, as `requested_family` returns it.
    """
    if family != "zero":
        return "sdpa"
    return os.environ.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sdpa")


def _deepspeed_config(args: "TrainingArguments") -> dict[str, Any]:
    if requested_family(args) != "zero":
        return {}
    assert args.deepspeed_plugin is not None
    config: dict[str, Any] = args.deepspeed_plugin.hf_ds_config.config
    return config


def _check_nvme(config: dict[str, Any]) -> None:
    """Raise an error if states are offloaded to a disk that is not there, or without the library that it needs."""
    zero = config.get("zero_optimization", {})
    for part in ("optimizer", "param"):
        if _device_of(config, part) != "nvme":
            continue
        path = zero[f"offload_{part}"].get("nvme_path")
        if not path or not Path(path).is_dir() or not os.access(path, os.W_OK):
            raise UsageError(
                f"offload_{part} to nvme_path {path}: create this folder on a local NVMe disk or name another"
            )
        _check_async_io()


def check_hpz(config: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Compare the ranks that share a copy of the parameters under hpZ with those of a node, and warn if they differ.

    Args:
        config (`dict`): the DeepSpeed config.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its numbers of ranks.

    Raises:
        UsageError: DeepSpeed cannot divide the ranks into groups of this size.
    """
    size = config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    ranks = int(environ.get("WORLD_SIZE", "1"))
    of_node = int(environ.get("LOCAL_WORLD_SIZE", "1"))
    if size in (1, of_node):
        return
    problem = f"zero_hpz_partition_size is {size} in the DeepSpeed config"
    if ranks % min(size, ranks):
        raise UsageError(
            f"{problem}, which does not divide {ranks} processes: set it to {of_node}, those of a node"
        )
    if of_node % size:
        effect = "so that parameters are gathered over the network"
    else:
        effect = f"so that each of them keeps 2 bytes x parameters / {size} more"
    logger.warning(
        "%s and a node has %d processes, %s: set it to %d", problem, of_node, effect, of_node
    )


def _check_async_io() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise MissingDependencyError(
            "DeepSpeed's NVMe offload needs libaio: install its headers (libaio-dev), or offload to the CPU with "
            "accelerate_configs/zero3_offload.yaml"
        )


def _device_of(config: dict[str, Any], part: str) -> str:
    return str(config.get("zero_optimization", {}).get(f"offload_{part}", {}).get("device", "none"))
