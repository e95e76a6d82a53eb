"""Combinations of model, method, strategy and machine that do not work, refused before anything is loaded."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hfscale.core.versions import require
from hfscale.errors import MissingDependencyError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.recipe.arguments import ModelArguments, RecipeTrainingMixin
from hfscale.recipe.compression import check_compression
from hfscale.trainer.strategy import requested_family, requested_strategy

if TYPE_CHECKING:
    from transformers import TrainingArguments

_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")


def check_compatibility(
    model_args: ModelArguments, training_args: RecipeTrainingMixin, layout: ParallelLayout | None = None
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
    family = requested_family(training_args)
    if family == "fsdp" and requested_strategy(training_args) == "fsdp1":
        raise UsageError(
            "fsdp_version 1: FSDP1 resumes another state than it saved, without an error (losses drift by 4e-3); "
            "convert the config to FSDP2 with `accelerate to-fsdp2`, or use accelerate_configs/fsdp2.yaml"
        )
    has_tp = layout is not None and layout.tp > 1
    compression = vars(training_args).get("gradient_compression", "none")  # the TRL recipes have no such flag
    check_compression(compression, is_ddp=family == "ddp" and not has_tp, use_cpu=training_args.use_cpu)
    config = _deepspeed_config(training_args) if family == "zero" else {}
    if model_args.load_in_4bit:
        _check_four_bits(family, config, layout)
    if family == "zero":
        _check_deepspeed(config, training_args)
    if layout is not None and layout.tp > 1:
        _check_tensor_parallel(model_args, training_args)
    if layout is not None and layout.cp > 1:
        kernel = os.environ.get("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "sdpa") if family == "zero" else "sdpa"
        if model_args.attn_implementation not in (None, kernel):
            raise UsageError(
                f"cp_size {layout.cp} splits sequences for {kernel} attention only: give --attn_implementation "
                f"{kernel} instead of {model_args.attn_implementation}"
            )


def _deepspeed_config(args: "TrainingArguments") -> dict[str, Any]:
    return args.deepspeed_plugin.hf_ds_config.config


def _check_four_bits(family: str, config: dict[str, Any], layout: ParallelLayout | None) -> None:
    if not torch.cuda.is_available():
        raise UsageError("--load_in_4bit needs a CUDA GPU and this machine has none: leave it out (plain LoRA)")
    require("QLoRA", "--load_in_4bit")
    if layout is not None and layout.tp > 1:
        raise UsageError(
            f"--load_in_4bit and tp_size {layout.tp}: 4-bit matrices cannot be split; use FSDP2 or ZeRO-3"
        )
    if family == "zero" and _device_of(config, "param") == "nvme":
        raise UsageError(
            "--load_in_4bit and ZeRO-3 parameters on NVMe: 4-bit weights cannot be swapped; offload them to the CPU "
            "(accelerate_configs/zero3_offload.yaml) or use accelerate_configs/fsdp2.yaml"
        )


def _check_deepspeed(config: dict[str, Any], args: "TrainingArguments") -> None:
    zero = config.get("zero_optimization", {})
    optimizer = str(config.get("optimizer", {}).get("type", ""))
    tp = config.get("tensor_parallel", {}).get("autotp_size", 1)
    if tp > 1:
        raise UsageError(
            f"tensor_parallel.autotp_size {tp} in the DeepSpeed config: AutoTP trains, but transformers counts its "
            "ranks as data parallel and cannot save its model; launch recipes/tp_pp/train.py with "
            f"accelerate_configs/tp_pp.yaml and --tp_size {tp}"
        )
    if optimizer.lower() in _ONE_BIT:
        if args.use_cpu:
            raise UsageError(
                f"{optimizer} compresses over NCCL and this machine has no GPU: use accelerate_configs/zero1.yaml"
            )
        if zero.get("stage", 0) > 1:
            raise UsageError(f"{optimizer} and ZeRO stage {zero['stage']}: it needs unsharded gradients; set stage 0")
    if zero.get("stage") == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
        raise UsageError(
            "the DeepSpeed config does not set stage3_gather_16bit_weights_on_model_save, without which the trained "
            "model cannot be saved as one folder: set it to true"
        )
    for part in ("optimizer", "param"):
        if _device_of(config, part) != "nvme":
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


def _check_tensor_parallel(model_args: ModelArguments, args: "TrainingArguments") -> None:
    if model_args.use_peft:
        raise UsageError(
            "--use_peft and tensor parallelism: adapters cannot be split; use accelerate_configs/fsdp2.yaml"
        )
    if str(args.resume_from_checkpoint).lower() not in ("true", "false"):
        raise UsageError(
            f"--resume_from_checkpoint {args.resume_from_checkpoint} and tensor parallelism: transformers keeps no "
            "optimizer state there; start from weights with --model_name_or_path, or use accelerate_configs/fsdp2.yaml"
        )


def _device_of(config: dict[str, Any], part: str) -> str:
    return str(config.get("zero_optimization", {}).get(f"offload_{part}", {}).get("device", "none"))
