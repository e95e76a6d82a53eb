"""Which jobs the shipped recipes can run, and why not the others, by the rules of `hfscale.facts.support`."""

import math
from dataclasses import replace

from hfscale.facts import support
from hfscale.facts.compilation import why_not_compiled
from hfscale.facts.support import TENSOR_PARALLEL_PLAN_MISSING, Combination
from hfscale.planner.adapters import has_merged_experts
from hfscale.planner.job import OPTIMIZERS, Job, strategy_of

TRAINER_OPTIMIZERS = {name: row["trainer"] for name, row in OPTIMIZERS.items() if "trainer" in row}
"""Trainer's names (`--optim`) of the planner's optimizers; Trainer does not have the others."""


def describe(job: Job) -> Combination:
    """Describe a job for the rules of `hfscale.facts.support`.

    Args:
        job (`Job`): the run.
    """
    runs_parallel_trainer = job.runs_parallel_trainer
    adapter_part = "use_dora" if job.use_dora else "none"
    strategy = f"zero{job.zero}" if uses_deepspeed(job) else strategy_of(job)
    family = job.shape.model_type if job.tower is None else job.tower.model_type
    return Combination(
        planned=True,
        engine="parallel_trainer" if runs_parallel_trainer else engine_of(job.stack, pp=1),
        trl=job.task != "text",
        task=job.task,
        images=job.tower is not None,
        strategy=strategy,
        zero=job.known_zero,
        tp=job.layout.tp,
        pp=job.layout.pp,
        cp=job.layout.cp,
        expert_parallel=job.expert_parallel,
        experts_implementation=job.experts_implementation,
        averages=bool(job.averages),
        sequence_parallel=job.sequence_parallel if runs_parallel_trainer else None,
        loss_parallel=job.loss_parallel,
        reshard=job.reshard,
        family=family,
        tp_plan=job.shape.model_type not in TENSOR_PARALLEL_PLAN_MISSING,
        precision=job.precision,
        pure=job.pure_bf16,
        compile=job.compile,
        compile_full=False,  # the emitted flags compile layers
        fused_loss=job.liger,
        method=job.method,
        expert_adapters=has_merged_experts(job),
        lora_dropout=job.lora_dropout > 0,
        adapter_part=adapter_part,
        optimizer=job.optimizer,
        offload=job.offload,
        recompute=job.activation_checkpointing,
        activation_offload=job.activation_offload,
        gathers_weights=True,  # the emitted DeepSpeed configs do
    )


def engine_of(framework: str, *, pp: int) -> str:
    """Return what trains, by its name in `hfscale.facts.support.Combination`.

    Args:
        framework (`str`): the training framework: `hf`, `titan` or `megatron`.
        pp (`int`): pipeline ranks; in `hf`, `ParallelTrainer` runs all layouts with a pipeline, and some of spread
            experts without one (`Job.runs_parallel_trainer`).
    """
    if framework != "hf":
        return framework
    return "parallel_trainer" if pp > 1 else "trainer"


def can_fuse_loss(job: Job) -> bool:
    """Return whether a recipe can run a job with a fused loss (`use_liger_kernel`), as far as the loss is concerned.

    Args:
        job (`Job`): the run.
    """
    if job.stack != "hf":
        return False
    return support.find_rule(replace(describe(job), fused_loss=True), "fused_loss") is None


def chunks_loss(job: Job) -> bool:
    """Return whether a recipe computes a fused loss of this run in chunks itself, and not by Liger Kernel.

    `hfscale.recipe.kernels` says when it does not: Gemma 2 changes its logits, and chunks were not tested in fp8.

    Args:
        job (`Job`): the run.
    """
    return (
        job.stack == "hf" and job.precision in ("bf16", "fp32") and job.shape.model_type != "gemma2"
    )


def compiles_by_default(job: Job) -> bool:
    """Return whether the recipe that runs a job compiles the layers without being asked to (`hfscale.recipe`).

    Layers with FlashAttention that is cut between packed documents, which the data and the packages decide, are not
    compiled by default; what `--emit` writes asks for it.

    Args:
        job (`Job`): the run.
    """
    reason = why_not_compiled(
        task=job.task,
        family=job.shape.model_type,
        method=job.method,
        strategy=f"zero{job.zero}" if uses_deepspeed(job) else strategy_of(job),
        ranks_per_replica=job.layout.ranks_per_replica,
        precision=job.precision,
    )
    return job.stack == "hf" and job.gpu.is_nvidia and reason is None


def uses_deepspeed(job: Job) -> bool:
    """Return whether DeepSpeed runs the job's strategy.

    Args:
        job (`Job`): the run.
    """
    return job.zero in (1, 2) or job.offload != "none"


def recipe_of(job: Job) -> str | None:
    """Return the path of the recipe that runs a job; None where there is none (`why_not`).

    Args:
        job (`Job`): the run.
    """
    if why_not(job) is not None:
        return None
    if job.task != "text":
        return f"recipes/{job.task}/train.py"
    if job.runs_parallel_trainer:
        return "recipes/tp_pp/train.py"
    is_plain = job.offload == "none" and strategy_of(job) in ("single", "ddp", "zero1")
    return f"recipes/{'ddp' if is_plain else 'sharded'}/train.py"


def why_not(job: Job, *about: str) -> str | None:
    """Explain why no recipe runs a job; return None where one does.

    Args:
        job (`Job`): the run.
        about (`str`): properties of `Combination`; only the rules about these are applied, all where none is given.
    """
    reason = support.why_not(describe(job), *about)
    return reason or _why_sequence_does_not_divide(job)


def _why_sequence_does_not_divide(job: Job) -> str | None:
    if not job.runs_parallel_trainer or job.layout.cp == 1:
        return None
    parts = job.layout.cp * math.lcm(2, job.sequence_split)
    if job.seq_len % parts:
        return f"sequences of {job.seq_len} tokens do not divide into the {parts} parts of context parallelism"
    return None
