"""What is to be planned for: a model, devices, and the options of its run."""

from dataclasses import dataclass, replace
from typing import TypedDict

from hfscale.core.options import options_of
from hfscale.facts.hardware import Accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model, find_tower
from hfscale.facts.tower_shape import TowerShape
from hfscale.planner.job import Job, splits_activations
from hfscale.planner.launchable import can_fuse_loss, chunks_loss, compiles_by_default
from hfscale.planner.options import Offload, RunOptions


class OtherModels(TypedDict):
    """What a task trains or runs beside the language model."""

    tower: TowerShape | None
    teacher_shape: ModelShape | None


def other_models(model: str | ModelShape, options: RunOptions) -> OtherModels:
    """Find what the task of the options needs beside the language model.

    Args:
        model (`str` or `ModelShape`): the model, as `plan` takes it; a shape has no vision tower.
        options (`RunOptions`): the options.

    Raises:
        UnsupportedModelError: the vision tower or the teacher is not known.
        ConfigFileError: a config cannot be read, or is wrong.
    """
    tower = teacher = None
    if options.task == "vision" and isinstance(model, str):
        tower = find_tower(model)
    if options.task == "distillation" and options.teacher is not None:
        teacher = find_model(options.teacher)
    return {"tower": tower, "teacher_shape": teacher}


@dataclass(frozen=True, kw_only=True)
class PlanRequest(RunOptions):
    """Describes what is to be planned for."""

    shape: ModelShape
    """The model."""
    gpu: Accelerator
    """The device."""
    gpus: int
    """Number of devices."""
    tower: TowerShape | None = None
    """What reads images, with the task `vision`."""
    teacher_shape: ModelShape | None = None
    """The teacher, with the task `distillation`."""

    def job(
        self, layout: ParallelLayout, *, global_batch: int, zero: int = 0, offload: Offload = "none"
    ) -> Job:
        """Return the run of a layout with micro-batches of one sequence.

        Args:
            layout (`ParallelLayout`): ranks along each axis.
            global_batch (`int`): sequences per step.
            zero (`int`): what data-parallel ranks shard.
            offload (`str`): what is kept in the CPU's memory.
        """
        options = {name: getattr(self, name) for name in options_of(RunOptions)}
        options |= {
            "liger": bool(self.liger),
            "compile": bool(self.compile),
            "global_batch": global_batch,
        }
        job = Job(
            **options,
            shape=self.shape,
            gpu=self.gpu,
            tower=self.tower,
            teacher_shape=self.teacher_shape,
            layout=layout,
            micro_batch=1,
            zero=zero,
            offload=offload,
            sequence_parallel=splits_activations(self.stack, layout),
            loss_parallel=splits_activations(self.stack, layout),
            compiled_loss=self.stack != "hf",  # the recipes compile layers
        )
        if self.compile is None and compiles_by_default(job):
            job = replace(job, compile=True)
        if not chunks_loss(job):
            return job
        is_fused = can_fuse_loss(job) if self.liger is None else self.liger
        return replace(job, chunked_loss=True, liger=is_fused)
