"""Which options of a run fit its task: what TRL's trainers and the recipes for them need."""

from typing import Any

from hfscale.core.spelling import spelled
from hfscale.errors import LayoutError, UsageError
from hfscale.facts.activations import factors_of
from hfscale.facts.support import Combination, check_support

Job = Any
"""A `hfscale.planner.job.Job`, whose module imports this one."""


def check_task(job: Job, strategy: str) -> None:
    """Check that the options of a run belong to its task and fit together.

    Args:
        job (`Job`): the run.
        strategy (`str`): the name of its strategy.

    Raises:
        LayoutError: sizes do not fit together.
        UnsupportedModelError: the memory of the teacher's family is not known.
        UsageError: an option does not belong to the task, or what the task needs is missing.
    """
    asked = Combination(
        planned=True,
        engine=job.stack,
        trl=job.task != "text",
        task=job.task,
        tp=job.layout.tp,
        pp=job.layout.pp,
        cp=job.layout.cp,
        fused_loss=job.liger,
        offload=job.offload,
    )
    check_support(asked, "task", "trl")
    if job.task == "vision":
        _check_images(job, strategy)
    if job.task == "distillation":
        _check_teacher(job)
    if job.generates:
        _check_completions(job)
    if job.task == "grpo":
        _check_generation(job)


def _check_images(job: Job, strategy: str) -> None:
    tower = job.tower
    if tower is None:
        raise UsageError(
            f"{spelled('task')} vision needs the config.json of an image-and-text model, with its vision_config: "
            "give its path, a hub id, or a built-in name such as gemma-3-4b"
        )
    asked = Combination(
        planned=True,
        images=True,
        method=job.method,
        compile=job.compile,
        optimizer=job.optimizer,
        strategy=strategy,
        family=tower.model_type,
    )
    check_support(asked, "images")
    if job.train_vision_tower and job.method != "full":
        given = spelled("train_vision_tower")
        method = spelled("method", job.method)
        raise UsageError(
            f"{given} with {method}: adapters are of the language model, and everything else is frozen; give one of "
            "them"
        )
    tokens = job.images * tower.tokens
    if tokens >= job.seq_len:
        given = spelled("images", job.images)
        length = spelled("seq_len")
        raise LayoutError(
            f"{given}, of {tower.tokens} tokens each: {length}, which includes them, is {job.seq_len}; use {length} "
            f"above {tokens}"
        )


def _check_teacher(job: Job) -> None:
    teacher = job.teacher_shape
    if teacher is None:
        needed = spelled("teacher")
        raise UsageError(
            f"{spelled('task')} distillation needs {needed}: name the model that is imitated"
        )
    if teacher.vocab != job.shape.vocab:
        given = spelled("teacher", job.teacher)
        raise UsageError(
            f"{given} predicts {teacher.vocab} tokens, and the model {job.shape.vocab}: the loss compares both, token "
            "by token; give a teacher with the same vocabulary"
        )
    factors_of(teacher.model_type, "bf16", "none")


def _check_completions(job: Job) -> None:
    if not 1 <= job.max_completion_length < job.seq_len:
        raise LayoutError(
            f"{spelled('max_completion_length')} is {job.max_completion_length}, and {spelled('seq_len')}, "
            "which includes "
            f"the prompt, is {job.seq_len}: give a completion length from 1 to {job.seq_len - 1}, or a "
            f"larger {spelled('seq_len')}"
        )


def _check_generation(job: Job) -> None:
    if job.num_generations < 2:
        raise LayoutError(
            f"{spelled('num_generations')} is {job.num_generations}: a group needs at least 2 completions"
        )
    if not 0 <= job.beta < float("inf"):
        raise UsageError(
            f"{spelled('beta')} is {job.beta}: it must be a finite number of at least 0"
        )
    if job.micro_batches % job.generation_rounds:
        raise LayoutError(
            f"{spelled('generation_rounds')} is {job.generation_rounds}, which does not divide "
            f"{job.micro_batches} "
            "micro-batches: use a divisor"
        )
    if job.global_batch // job.generation_rounds % job.num_generations:
        near = max(1, round(job.global_batch / job.num_generations)) * job.num_generations
        raise LayoutError(
            f"{spelled('global_batch')} is {job.global_batch} completions in {job.generation_rounds} rounds, "
            "not a multiple "
            f"of {spelled('num_generations')} {job.num_generations}: use a global batch such as {near}"
        )
