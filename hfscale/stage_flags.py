"""From flags to the layout and stages of a `ParallelTrainer`, and what it cannot do."""

from typing import Any

from transformers import TrainingArguments

from hfscale.arguments import ParallelArguments
from hfscale.errors import UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.parallel.checks import decide_layout
from hfscale.parallel.stages import StagePlan


def plan_stages(
    parallel: ParallelArguments, args: TrainingArguments, *, world_size: int | None = None
) -> tuple[ParallelLayout, StagePlan]:
    """The layout and the stages that these arguments ask for, before a model is looked at.

    Args:
        world_size (`int`, *optional*): ranks to plan for; absent: those of this run.

    Raises:
        LayoutError: sizes that do not make up the world, or micro-batches that do not keep the schedule going.
        UsageError: an axis or a schedule that there is not.
    """
    if (parallel.cp_size or 1) > 1:
        raise UsageError(f"--cp_size {parallel.cp_size}: pipelines have no ring attention; use recipes/sharded for it")
    layout = decide_layout(
        world_size or args.world_size,
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        dp_shard=parallel.dp_shard_size,
        dp_replicate=parallel.dp_replicate_size,
    )
    plan = StagePlan(schedule=parallel.pipeline_schedule, pp=layout.pp, virtual_stages=parallel.virtual_stages)
    plan.check_micro_batches(args.gradient_accumulation_steps)
    return layout, plan


def check_arguments(args: TrainingArguments, *, compute_metrics: Any = None, **_: Any) -> None:
    """Raise a UsageError for what a pipeline has no way to do; keywords are those of a Trainer."""
    if args.deepspeed or args.fsdp:
        raise UsageError("ParallelTrainer shards the model itself: leave --fsdp and --deepspeed out")
    if args.fp16:
        raise UsageError("--fp16 scales losses per rank, which stages cannot share: use --bf16")
    if compute_metrics is not None:
        raise UsageError("compute_metrics needs logits, which stay on the last stage: evaluate by eval_loss")
    if not args.average_tokens_across_devices:
        raise UsageError(
            "--average_tokens_across_devices false: ParallelTrainer weighs every token alike; leave it out"
        )
    if str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)) in ("reduce_lr_on_plateau", "greedy"):
        raise UsageError(
            f"--lr_scheduler_type {args.lr_scheduler_type.value} cannot be resumed on another layout: use another"
        )
    if args.auto_find_batch_size:
        raise UsageError("--auto_find_batch_size wraps the model anew: set --per_device_train_batch_size")
