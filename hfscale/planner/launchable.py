"""Which jobs the shipped recipes can run, and why not the others."""

import math

from hfscale.facts.parallel_families import CONTEXT_PARALLEL_TESTED
from hfscale.planner.job import Job, strategy_of

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd", "adafactor": "adafactor"}
"""What the Trainer calls an optimizer (`--optim`); the others it does not have."""

STAGE_OPTIMIZERS = ("adamw", "sgd")
"""Those that update parameters which are cut over several axes."""

CONTEXT_PARALLEL_NOT_PLANNED = ("phi3",)
"""Families whose published configs have rotary angles that depend on the longest position, which context parallelism
does not support; the trainer checks the config itself."""


def uses_deepspeed(job: Job) -> bool:
    """Whether the strategy is DeepSpeed's."""
    return job.zero in (1, 2) or job.offload != "none"


def recipe_of(job: Job) -> str | None:
    """The recipe that runs a job; None where `why_not` says why there is none."""
    if why_not(job) is not None:
        return None
    if job.layout.pp > 1:
        return "recipes/tp_pp/train.py"
    plain = job.offload == "none" and strategy_of(job) in ("single", "ddp", "zero1")
    return f"recipes/{'ddp' if plain else 'sharded'}/train.py"


def why_not(job: Job) -> str | None:
    """Why no recipe runs a job; None where one does."""
    if job.framework != "hf":
        return f"hfscale launches Hugging Face's stack, not {job.framework}"
    if job.layout.pp > 1 and (reason := why_no_stages(job)) is not None:
        return reason
    if job.optimizer not in OPTIMIZERS:
        return f"the Trainer has no optimizer {job.optimizer}: use {', '.join(OPTIMIZERS)}"
    if job.offload != "none" and job.optimizer != "adamw":
        return f"DeepSpeed's offload has AdamW on the CPU, not {job.optimizer}"
    if job.precision == "fp8" and uses_deepspeed(job):
        return "8-bit products go with DDP and FSDP2, not with DeepSpeed"
    return None


def why_no_stages(job: Job) -> str | None:
    """Why `ParallelTrainer` cannot run a job in pipeline stages; None where it can."""
    if job.layout.cp > 1 and (reason := _why_no_context(job)) is not None:
        return reason
    if job.zero in (1, 2):
        return "ParallelTrainer's replicas share all states (ZeRO stage 3, FSDP2) or none (stage 0)"
    if job.layout.tp > 1 and not job.loss_parallel:
        return "ParallelTrainer computes the loss on logits that stay split over the tensor-parallel ranks"
    if job.sequence_parallel and job.layout.tp == 1:
        return "sequences are split among tensor-parallel ranks, of which there is one"
    if not job.reshard:
        return "ParallelTrainer itself decides when parameters are gathered"
    if job.compile:
        return "stages are not compiled: leave out --compile"
    if job.fused_loss:
        return "fused kernels know no stages: leave out --liger"
    if job.precision in ("fp16", "fp8"):
        return f"stages train in bf16 or fp32, not {job.precision}"
    if job.method != "full":
        return "adapters are planned with data parallelism alone"
    if job.optimizer not in STAGE_OPTIMIZERS:
        return f"optimizer {job.optimizer} was not tried on sharded stages: use {' or '.join(STAGE_OPTIMIZERS)}"
    return None


def _why_no_context(job: Job) -> str | None:
    """Why `ParallelTrainer` cannot cut a job's sequences over ranks; None where it can."""
    family = job.shape.model_type
    if family not in CONTEXT_PARALLEL_TESTED or family in CONTEXT_PARALLEL_NOT_PLANNED:
        return f"context parallelism was not tested with {family}"
    if job.zero != 3:
        return "ParallelTrainer shards all states (ZeRO stage 3) over the ranks that share a sequence"
    parts = job.layout.cp * math.lcm(2, job.layout.tp if job.sequence_parallel else 1)
    if job.seq_len % parts:
        return f"sequences of {job.seq_len} tokens do not divide by {parts}, into which their ranks cut them"
    return None
