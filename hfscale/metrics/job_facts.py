"""Describes a run as the planner does, so that the report can compare its estimate with what was measured."""

import os
from typing import TYPE_CHECKING, Any

from hfscale.trainer.setup import layout_axes
from hfscale.trainer.state import requested_optimizer
from hfscale.trainer.strategies.native import native_layout
from hfscale.trainer.strategies.parallel import is_parallel_trainer
from hfscale.trainer.strategy import running_strategy

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

_LEFT_OUT = (
    "id2label",
    "label2id",
    "quantization_config",
    "torch_dtype",
    "dtype",
    "task_specific_params",
)
"""Keys of a model's config that are large, or not of its shape."""


def job_facts(trainer: "Trainer") -> dict[str, Any]:
    """Return what `hfscale.planner.job.Job` needs in addition to the run's workload, in values that JSON has.

    Args:
        trainer (`Trainer`): prepared for training.

    Returns:
        `dict[str, Any]`: the model's `config`, the `layout` as sizes of its axes, `zero`, `micro_batch`, `method`,
            `lora_rank`, `optimizer` (Trainer's name), `compile`, `fused_loss`, `offload`, `gpus_per_node`,
            `virtual_stages`, `sequence_parallel`, `expert_parallel`, `schedule` (a name in `hfscale.facts.schedules`)
            and `trainer` (its class); empty for a model without a config.
    """
    args = trainer.args
    config = getattr(trainer.model, "config", None)
    if config is None:
        return {}
    strategy = running_strategy(trainer)
    adapters = getattr(trainer.model, "peft_config", None)
    in_4_bits = bool(getattr(trainer.model, "is_loaded_in_4bit", False))
    parallel = trainer if is_parallel_trainer(trainer) else None
    native = native_layout(trainer.model)
    spread = parallel.layout if parallel is not None else native
    adapter_method = "qlora" if in_4_bits else "lora"
    return {
        "config": {key: value for key, value in config.to_dict().items() if key not in _LEFT_OUT},
        "layout": layout_axes(trainer, strategy),
        "zero": {"fsdp2": 3, "parallel": 3, "native": 3, "zero1": 1, "zero2": 2, "zero3": 3}.get(
            strategy, 0
        ),
        "micro_batch": args.train_batch_size,
        "method": adapter_method if adapters else "full",
        "lora_rank": next((int(one.r) for one in adapters.values() if hasattr(one, "r")), 16)
        if adapters
        else 16,
        "optimizer": requested_optimizer(args),
        "compile": bool(args.torch_compile),
        "fused_loss": _fuses_loss(args),
        "offload": _offload(trainer),
        "gpus_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)),
        "virtual_stages": parallel.stage_plan.per_rank if parallel is not None else 1,
        "schedule": parallel.stage_plan.schedule if parallel is not None else "1F1B",
        "sequence_parallel": parallel is not None and parallel.parallelized.sequence_parts > 1,
        "expert_parallel": getattr(spread, "ep", 1),
        "trainer": type(trainer).__name__,
    }


def _fuses_loss(args: "TrainingArguments") -> bool:
    """Return whether the loss is computed without all logits: the recipes say it, others have Liger's flag only."""
    loss = vars(args).get("fused_loss")
    return bool(args.use_liger_kernel) if loss is None else loss in ("chunked", "liger")


def _offload(trainer: "Trainer") -> str:
    """Return what is kept in the CPU's memory, by the planner's names."""
    state = trainer.accelerator.state
    if state.deepspeed_plugin is not None:
        zero = state.deepspeed_plugin.deepspeed_config.get("zero_optimization", {})
        devices = [
            (zero.get(f"offload_{part}") or {}).get("device", "none")
            for part in ("param", "optimizer")
        ]
        if devices[0] != "none":
            return "full"
        return "optimizer" if devices[1] != "none" else "none"
    if trainer.is_fsdp_enabled and state.fsdp_plugin.cpu_offload:
        return "full"
    return "none"
