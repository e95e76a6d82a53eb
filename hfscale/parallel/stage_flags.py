"""From flags to the layout and stages of a `ParallelTrainer`, and what it cannot do."""

from typing import Any

from transformers import TrainingArguments

from hfscale.errors import UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.integrations.strategy import requested_family
from hfscale.parallel.arguments import ParallelArguments
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
    layout = decide_layout(
        world_size or args.world_size,
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        cp=parallel.cp_size,
        dp_shard=parallel.dp_shard_size,
        dp_replicate=parallel.dp_replicate_size,
    )
    plan = StagePlan(schedule=parallel.pipeline_schedule, pp=layout.pp, virtual_stages=parallel.virtual_stages)
    plan.check_micro_batches(args.gradient_accumulation_steps)
    return layout, plan


def check_arguments(
    args: TrainingArguments,
    *,
    cp: int = 1,
    compute_metrics: Any = None,
    compute_loss_func: Any = None,
    model_init: Any = None,
    optimizers: tuple[Any, Any] = (None, None),
    **_: Any,
) -> None:
    """Make sure that nothing is asked for that stages have no way to do; `cp` ranks share a sequence, and the other
    keywords are those of a Trainer.

    Raises:
        UsageError: something is; the message names it and the mend.
    """
    family = requested_family(args)
    scheduler = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    compression = getattr(args, "gradient_compression", "none")
    refused = {
        "DeepSpeed: ParallelTrainer shards the model itself; launch with accelerate_configs/tp_pp.yaml (ZeRO goes "
        "with recipes/sharded)": family == "zero",
        "FSDP: ParallelTrainer shards the model itself; launch with accelerate_configs/tp_pp.yaml": family == "fsdp",
        "--fp16 scales losses per rank, which stages cannot share: use --bf16": args.fp16,
        "compute_metrics needs logits, which stay on the last stage: evaluate by eval_loss": compute_metrics,
        f"cp_size {cp}: compute_loss_func needs whole sequences, of which a rank has a part; set --cp_size 1": (
            cp > 1 and compute_loss_func
        ),
        "model_init makes models that are not cut: give model, on the meta device where it is large": model_init,
        "optimizers: an optimizer of the uncut model steps other parameters; choose one by --optim": optimizers[0],
        "--average_tokens_across_devices false: every token counts alike here; leave it out": not (
            args.average_tokens_across_devices
        ),
        "--auto_find_batch_size cuts the model anew: set --per_device_train_batch_size": args.auto_find_batch_size,
        "--torch_compile: stages are not compiled yet; leave it out": args.torch_compile,
        "--use_liger_kernel: its kernels know no stages; leave it out": args.use_liger_kernel,
        "--neftune_noise_alpha: later stages have no embeddings; leave it out": args.neftune_noise_alpha,
        "--include_num_input_tokens_seen counts tokens once per rank: see scaling/tokens_seen": (
            args.include_num_input_tokens_seen != "no"
        ),
        f"--lr_scheduler_type {scheduler} cannot be resumed on another layout: use another": (
            scheduler in ("reduce_lr_on_plateau", "greedy")
        ),
        f"--gradient_compression {compression} is DDP's: leave it out": compression != "none",
    }
    for message, is_asked in refused.items():
        if is_asked:
            raise UsageError(message)
