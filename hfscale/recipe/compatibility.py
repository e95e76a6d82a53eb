"""Combinations of model, method, strategy and machine that do not work, refused before anything is loaded."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hfscale.core.versions import require
from hfscale.errors import MissingDependencyError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import Combination, check_support
from hfscale.parallel.descriptions import describe_arguments
from hfscale.recipe.arguments import RecipeTrainingMixin
from hfscale.recipe.layout import NativeParallelLayout, launcher_attention, strategy_of
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.trainer.strategies.description import offload_device
from hfscale.trainer.strategies.requested import deepspeed_config, requested
from hfscale.trainer.strategies.zero import check_hpz


def check_compatibility(
    model_args: ModelArguments,
    training_args: RecipeTrainingMixin,
    layout: ParallelLayout | None = None,
    *,
    islands: int = 1,
    average: bool = False,
    skip_bad_batches: int | None = None,
) -> None:
    """Check that the training method, the strategy, the layout and the machine work together.

    Args:
        model_args (`ModelArguments`): the flags of the model and of the adapters.
        training_args (`RecipeTrainingMixin`): the flags of the training.
        layout (`ParallelLayout`, *optional*): the sizes of the parallel axes, if the recipe has any.
        islands (`int`): number of islands that train together.
        average (`bool`): whether an average of the weights is kept.
        skip_bad_batches (`int`, *optional*): how many bad batches the run may leave out.

    Raises:
        UsageError: two of them exclude each other; the message names both and how to fix it.
        MissingDependencyError: a package that one of them needs is not installed.
    """
    layout = layout or ParallelLayout()
    asked = _describe(model_args, training_args, layout)
    asked = replace(asked, islands=islands, average=average, skip_bad_batches=skip_bad_batches)
    config = {}
    if requested(training_args).by_deepspeed:
        config = deepspeed_config(training_args.deepspeed_plugin)
        zero = config.get("zero_optimization", {})
        gathers = zero.get("stage3_gather_16bit_weights_on_model_save")
        device = offload_device(config, "optimizer")
        asked = replace(asked, gathers_weights=bool(gathers), optimizer_device=device)
    check_support(asked)
    if model_args.load_in_4bit:
        require("QLoRA", "--load_in_4bit")
    _check_nvme(config)
    check_hpz(config, os.environ)


def _describe(
    model_args: ModelArguments, args: RecipeTrainingMixin, layout: ParallelLayout
) -> Combination:
    """Describe a run by its flags, the launcher's config and the layout that both have given."""
    by_launcher = requested(args)
    if model_args.load_in_4bit:
        method = "qlora"
    elif model_args.use_peft:
        method = "lora"
    else:
        method = "full"
    return replace(
        describe_arguments(args),
        strategy=strategy_of(layout, by_launcher),
        tp=layout.tp,
        cp=layout.cp,
        expert_parallel=layout.ep if isinstance(layout, NativeParallelLayout) else None,
        method=method,
        trl=args.records is not None,
        task=args.task,
        attention=model_args.attn_implementation,
        launcher_attention=launcher_attention(by_launcher),
        precision=args.mixed_precision,
        recompute=args.recompute,
        has_cuda=torch.cuda.is_available(),
        router_bias=vars(args).get("router_bias_update_rate"),
    )


def _check_nvme(config: dict[str, Any]) -> None:
    """Raise an error if states are offloaded to a disk that is not there, or without the library that it needs."""
    zero = config.get("zero_optimization", {})
    for part in ("optimizer", "param"):
        if offload_device(config, part) != "nvme":
            continue
        path = zero[f"offload_{part}"].get("nvme_path")
        if not path or not Path(path).is_dir() or not os.access(path, os.W_OK):
            raise UsageError(
                f"offload_{part} to nvme_path {path}: create this folder on a local NVMe disk or name another"
            )
        _check_async_io()


def _check_async_io() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise MissingDependencyError(
            "DeepSpeed's NVMe offload needs libaio: install its headers (libaio-dev), or offload to the CPU with "
            "accelerate_configs/zero3_offload.yaml"
        )
