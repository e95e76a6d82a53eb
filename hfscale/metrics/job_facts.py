"""Describes a run as the planner does, so that the report can compare its estimate with what was measured."""

from typing import TYPE_CHECKING, Any

from hfscale.core.launch_variables import launch_number
from hfscale.trainer.state import micro_batch_size, requested_optimizer
from hfscale.trainer.strategies import Strategy

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
            `virtual_stages`, `sequence_parallel`, `expert_parallel`, `schedule` (a name in `hfscale.facts.schedules`),
            `trainer` (its class) and `of_trl` (whether it is one of TRL's); empty for a model without a config.
    """
    args = trainer.args
    config = getattr(trainer.model, "config", None)
    if config is None:
        return {}
    strategy = Strategy.of(trainer)
    micro_batch = micro_batch_size(trainer)
    adapters = getattr(trainer.model, "peft_config", None)
    in_4_bits = bool(getattr(trainer.model, "is_loaded_in_4bit", False))
    adapter_method = "qlora" if in_4_bits else "lora"
    ranks = [int(one.r) for one in (adapters or {}).values() if hasattr(one, "r")]
    return {
        "config": {key: value for key, value in config.to_dict().items() if key not in _LEFT_OUT},
        "layout": strategy.axes(),
        "zero": strategy.facts.zero,
        "micro_batch": micro_batch,
        "method": adapter_method if adapters else "full",
        "lora_rank": ranks[0] if ranks else 16,
        "optimizer": requested_optimizer(args),
        "compile": bool(args.torch_compile),
        "fused_loss": _fuses_loss(args),
        "offload": strategy.offload(),
        "gpus_per_node": launch_number("LOCAL_WORLD_SIZE", args.world_size),
        "virtual_stages": strategy.stages_per_rank,
        "schedule": strategy.schedule,
        "sequence_parallel": strategy.splits_sequences,
        "expert_parallel": strategy.expert_ranks(),
        "trainer": type(trainer).__name__,
        "of_trl": any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__),
    }


def _fuses_loss(args: "TrainingArguments") -> bool:
    """Return whether the loss is computed without all logits: the recipes say it, others have Liger's flag only."""
    loss = vars(args).get("fused_loss")
    return bool(args.use_liger_kernel) if loss is None else loss in ("chunked", "liger")
