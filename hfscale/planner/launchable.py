"""Which jobs the shipped recipes can run, and why they cannot run the others."""

import math

from hfscale.facts.parallel_families import CONTEXT_PARALLEL_TESTED
from hfscale.planner.job import OPTIMIZERS, Job, strategy_of

TRAINER_OPTIMIZERS = {name: row["trainer"] for name, row in OPTIMIZERS.items() if "trainer" in row}
"""Trainer's names (`--optim`) of the planner's optimizers; Trainer does not have the others."""

STAGE_OPTIMIZERS = ("adamw", "sgd")
"""Optimizers that were tested with parameters that are sharded over several mesh axes."""

CONTEXT_PARALLEL_NOT_PLANNED = ("phi3",)
"""Families whose published configs have rotary angles that depend on the longest position, which context parallelism
does not support; the trainer checks the config itself."""


LIGER_FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
)
"""Families whose head and loss Liger Kernel fuses by default: those of 0.6.0, the oldest version that hfscale accepts
(linkedin/Liger-Kernel, tag v0.6.0, src/liger_kernel/transformers/monkey_patch.py: the entries of
`MODEL_TYPE_TO_APPLY_LIGER_FN` with `fused_linear_cross_entropy=True`). Granite is an entry without it. Version 0.8.2
adds exaone4, gpt_oss, hunyuan_v1_dense, ministral, nemotron, olmo3 and smollm3; with an older one their logits would
be computed in full, after a log message only."""


def can_fuse_loss(job: Job) -> bool:
    """Returns whether a recipe can run a job with a fused loss (`use_liger_kernel`).

    Liger supports some families. It is planned without tensor, pipeline and context parallelism, with which it was not
    tested. TRL fuses the loss itself.
    """
    is_supported = job.framework == "hf" and job.shape.model_type in LIGER_FAMILIES and job.task == "text"
    return is_supported and job.layout.ranks_per_replica == 1


def uses_deepspeed(job: Job) -> bool:
    """Returns whether DeepSpeed runs the job's strategy."""
    return job.zero in (1, 2) or job.offload != "none"


def recipe_of(job: Job) -> str | None:
    """Returns the path of the recipe that runs a job; None where there is none (`why_not`)."""
    if why_not(job) is not None:
        return None
    if job.task != "text":
        return f"recipes/{job.task}/train.py"
    if job.layout.pp > 1:
        return "recipes/tp_pp/train.py"
    plain = job.offload == "none" and strategy_of(job) in ("single", "ddp", "zero1")
    return f"recipes/{'ddp' if plain else 'sharded'}/train.py"


def why_not(job: Job) -> str | None:
    """Explains why no recipe runs a job; returns None where one does."""
    if job.framework != "hf":
        return f"hfscale launches stack hf only, not {job.framework}"
    if job.layout.pp > 1 and (reason := why_no_stages(job)) is not None:
        return reason
    if job.optimizer not in TRAINER_OPTIMIZERS:
        return f"Trainer has no optimizer {job.optimizer}: use {', '.join(TRAINER_OPTIMIZERS)}"
    if job.offload != "none" and job.optimizer != "adamw":
        return f"DeepSpeed's offload supports AdamW only, not {job.optimizer}"
    if job.pure and job.method == "full":
        return "the recipes keep parameters in fp32: no recipe trains with parameters in bf16 (--pure-bf16)"
    if job.fused_loss and not can_fuse_loss(job) and job.layout.pp == 1:
        families = ", ".join(LIGER_FAMILIES)
        return f"Liger fuses the loss of {families}, without tensor or context parallelism: leave out --liger"
    if job.precision == "fp8" and uses_deepspeed(job):
        return "fp8 is supported with DDP and FSDP2, not with DeepSpeed"
    return None


def why_no_stages(job: Job) -> str | None:
    """Explains why `ParallelTrainer` cannot run a job in pipeline stages; returns None if it can."""
    if job.layout.cp > 1 and (reason := _why_no_context(job)) is not None:
        return reason
    if job.zero in (1, 2):
        return "ParallelTrainer shards all states (ZeRO stage 3, FSDP2) or none (stage 0)"
    if job.layout.tp > 1 and not job.loss_parallel:
        return "ParallelTrainer computes the loss on logits that stay split over the tensor-parallel ranks"
    if job.sequence_parallel and job.layout.tp == 1:
        return "sequence parallelism needs more than one tensor-parallel rank"
    if not job.reshard:
        return "ParallelTrainer decides itself when parameters are gathered: leave out reshard"
    if job.compile:
        return "pipeline stages are not compiled: leave out --compile"
    if job.fused_loss:
        return "fused kernels do not support pipeline stages: leave out --liger"
    if job.precision in ("fp16", "fp8"):
        return f"pipeline stages train in bf16 or fp32, not {job.precision}"
    if job.method != "full":
        return "adapters are planned with data parallelism alone"
    if job.optimizer not in STAGE_OPTIMIZERS:
        return f"optimizer {job.optimizer} was not tested with sharded stages: use {' or '.join(STAGE_OPTIMIZERS)}"
    return None


def _why_no_context(job: Job) -> str | None:
    """Why `ParallelTrainer` cannot split a job's sequences over ranks; None if it can."""
    family = job.shape.model_type
    if family not in CONTEXT_PARALLEL_TESTED or family in CONTEXT_PARALLEL_NOT_PLANNED:
        return f"context parallelism was not tested with {family}"
    if job.zero != 3:
        return "with context parallelism ParallelTrainer shards all states (ZeRO stage 3)"
    parts = job.layout.cp * math.lcm(2, job.layout.tp if job.sequence_parallel else 1)
    if job.seq_len % parts:
        return f"sequences of {job.seq_len} tokens do not divide into the {parts} parts of context parallelism"
    return None
