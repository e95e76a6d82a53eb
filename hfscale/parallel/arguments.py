"""The flags of the parallel axes, the layout and stages that they ask for, and the arguments that are refused."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import TrainingArguments

from hfscale.core.flags import require_positive
from hfscale.core.option_flags import flag
from hfscale.core.spelling import spelled
from hfscale.errors import LayoutError
from hfscale.facts.expert_layout import ExpertLayout
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.schedules import SCHEDULES
from hfscale.facts.support import check_support
from hfscale.parallel.descriptions import describe_arguments
from hfscale.parallel.stages import StagePlan
from hfscale.trainer.strategies.requested import requested

_FUSED = ("chunked", "liger")
"""Values of `--fused_loss` by which the loss never has all logits."""


@dataclass(kw_only=True)
class ParallelArguments:
    """Sizes of the parallel axes, where they differ from the launcher's config.

    Raises:
        ParameterError: a size is not greater than 0.
    """

    dp_replicate_size: int | None = flag("Replicas of the sharded model (HSDP).")
    dp_shard_size: int | None = flag(
        "Ranks that share one replica; default: the number of processes divided by the other sizes."
    )
    fsdp_size: int | None = flag(
        "The same where transformers itself shards the model: with accelerate_configs/native.yaml (recipes/sharded)."
    )
    ep_size: int | None = flag(
        "Ranks that share the experts of a layer, among those of a replica (recipes/sharded, where transformers "
        "shards the model) or of a pipeline stage (recipes/tp_pp)."
    )
    cp_size: int | None = flag(
        "Ranks that share one sequence (FSDP2: ring attention; DeepSpeed: Ulysses; tp_pp: keys gathered)."
    )
    tp_size: int | None = flag("Ranks that share each matrix.")
    pp_size: int | None = flag("Ranks that share the layers (recipes/tp_pp).")
    sequence_parallel: bool = flag(
        "The ranks of --tp_size split the sequence where they would all compute the same norms and residuals "
        "(recipes/tp_pp).",
        default=False,
    )
    pipeline_schedule: str = flag(
        "Pipeline schedule: " + ", ".join(SCHEDULES) + ".", default="1F1B", choices=tuple(SCHEDULES)
    )
    overlap_exchange: bool = flag(
        "With --pipeline_schedule DualPipeV and --ep_size: one micro-batch computes while tokens of another one are "
        "sent to their experts (recipes/tp_pp).",
        default=True,
    )
    virtual_stages: int | None = flag(
        "Stages per pipeline rank, for the schedules that take several."
    )
    check_parity: bool = flag(
        "Before the training, compare two steps of a small model of the same family under this layout with one "
        "process; required for a family that no test has compared.",
        default=False,
    )
    dry_run: int | None = flag(
        "Do not train: build the program of this many ranks without weights or GPUs, print memory and schedule."
    )

    def __post_init__(self) -> None:
        require_positive(self)


def decide_layout(
    world_size: int,
    *,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    dp_shard: int | None = None,
    dp_replicate: int | None = None,
    ep: int | None = None,
) -> ParallelLayout:
    """Make the layout that the given sizes of the axes describe.

    Args:
        world_size (`int`): the number of processes.
        tp, pp, cp, dp_replicate (`int`, *optional*): sizes of the axes; 1 where absent.
        dp_shard (`int`, *optional*): ranks that share one replica; absent: the processes divided by the other sizes.
        ep (`int`, *optional*): ranks that share the experts of a layer, among those of the other axes of a stage.

    Returns:
        The layout, an `ExpertLayout` where the experts are spread.

    Raises:
        LayoutError: the product of the sizes is not the world size, or `ep` does not fit the ranks of a stage; the
            message names the nearest sizes that fit.
    """
    tp = tp or 1
    pp = pp or 1
    cp = cp or 1
    dp_replicate = dp_replicate or 1
    if dp_shard is None:
        sizes = {"pp_size": pp, "tp_size": tp, "cp_size": cp, "dp_replicate_size": dp_replicate}
        product = math.prod(sizes.values())
        if world_size % product:
            with_cp = f"cp_size {cp} x " if cp > 1 else ""
            raise LayoutError(
                f"tp_size {tp} x pp_size {pp} x {with_cp}dp_replicate_size {dp_replicate} = {product} does not divide "
                f"the {world_size} processes: {_nearest_size(world_size, sizes)}, or start "
                f"{max(1, round(world_size / product)) * product}"
            )
        dp_shard = world_size // product
    layout = ParallelLayout(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp)
    layout.check_world_size(world_size)
    if ep is None or ep == 1:
        return layout
    spread = ExpertLayout(**asdict(layout), ep=ep)
    spread.check_experts()
    return spread


def _nearest_size(world_size: int, sizes: dict[str, int]) -> str:
    """Name the first size of which another value makes the product of all sizes divide the world."""
    for name, size in sizes.items():
        product_of_others = math.prod(sizes.values()) // size
        legal = [n for n in range(1, world_size + 1) if world_size % (n * product_of_others) == 0]
        if legal:
            nearest = min(legal, key=lambda n: abs(n - size))
            return f"set {spelled(name, nearest)}"
    return f"set {spelled('tp_size', 1)} and {spelled('pp_size', 1)}"


def plan_stages(
    parallel: ParallelArguments,
    args: TrainingArguments,
    *,
    world_size: int | None = None,
    is_batch_changing: bool = False,
) -> tuple[ParallelLayout, StagePlan]:
    """Work out the layout and the pipeline stages that the arguments ask for. Needs no model.

    Args:
        parallel (`ParallelArguments`): sizes of the axes and the schedule.
        args (`TrainingArguments`): its world size and its `gradient_accumulation_steps`, which are the micro-batches.
        world_size (`int`, *optional*): ranks to plan for; absent: those of this run.
        is_batch_changing (`bool`): whether a callback decides how many micro-batches a step has. Then
            `gradient_accumulation_steps` does not, and the callback asks for each of its numbers.

    Returns:
        The layout and the stages.

    Raises:
        LayoutError: the sizes do not fit the world, or the schedule cannot run that many micro-batches.
        UsageError: the schedule is unknown, does not support this number of stages per rank, or a size is none of
            `ParallelTrainer`'s.
    """
    asked = replace(
        describe_arguments(args), engine="parallel_trainer", fsdp_size=parallel.fsdp_size
    )
    check_support(asked, "fsdp_size")
    layout = decide_layout(
        world_size or args.world_size,
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        cp=parallel.cp_size,
        dp_shard=parallel.dp_shard_size,
        dp_replicate=parallel.dp_replicate_size,
        ep=parallel.ep_size,
    )
    plan = StagePlan(
        schedule=parallel.pipeline_schedule, pp=layout.pp, virtual_stages=parallel.virtual_stages
    )
    if not is_batch_changing:
        plan.check_micro_batches(args.gradient_accumulation_steps)
    return layout, plan


def has_changing_batch(callbacks: Sequence[Any] | None) -> bool:
    """Return whether a callback decides how many micro-batches a step has.

    Args:
        callbacks (`Sequence`, *optional*): what the constructor of the Trainer was given.
    """
    return any(getattr(each, "decides_accumulation", False) for each in callbacks or ())


def check_arguments(
    args: TrainingArguments,
    *,
    pp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    compute_loss: bool = False,
    model_init: Any = None,
    optimizers: tuple[Any, Any] | None = None,
) -> None:
    """Make sure that `ParallelTrainer` supports everything that these arguments ask for.

    Args:
        args (`TrainingArguments`): the run's arguments.
        pp (`int`): ranks that share the layers.
        cp (`int`): ranks that share one sequence.
        sequence_parallel (`bool`): whether the tensor parallel ranks split sequences between blocks.
        compute_loss (`bool`): whether the loss is the user's own, by `compute_loss` or `compute_loss_func`.
        model_init (`callable`, *optional*): as given to the Trainer.
        optimizers (`tuple`, *optional*): the optimizer and the scheduler given to the Trainer; None where
            it is to make them.

    Raises:
        UsageError: one of the arguments is not supported; the message names it and how to fix it.
    """
    by_launcher = requested(args)
    schedule = args.lr_scheduler_type
    precision = "fp32"
    if args.fp16:
        precision = "fp16"
    asked = replace(
        describe_arguments(args),
        engine="parallel_trainer",
        # Without DeepSpeed and FSDP the launcher leaves the distribution to this Trainer
        strategy="parallel" if by_launcher.is_replicated else by_launcher.name,
        pp=pp,
        cp=cp,
        sequence_parallel=sequence_parallel,
        precision=precision,
        compute_loss=compute_loss,
        model_init=bool(model_init),
        optimizers=bool(optimizers and optimizers[0]),
        fused_loss=bool(args.use_liger_kernel) or vars(args).get("fused_loss") in _FUSED,
        average_tokens_across_devices=bool(args.average_tokens_across_devices),
        auto_find_batch_size=bool(args.auto_find_batch_size),
        neftune=args.neftune_noise_alpha,
        tokens_seen=str(args.include_num_input_tokens_seen),
        lr_scheduler=str(getattr(schedule, "value", schedule)),
    )
    check_support(asked)
