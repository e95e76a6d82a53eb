"""What is to be planned for: a model, devices, and the options of its run."""

from dataclasses import dataclass, replace

from hfscale.core.options import options_of
from hfscale.facts.hardware import Accelerator
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.planner.job import Job, splits_activations
from hfscale.planner.launchable import can_fuse_loss, chunks_loss, compiles_by_default
from hfscale.planner.options import Offload, RunOptions


@dataclass(frozen=True, kw_only=True)
class PlanRequest(RunOptions):
    """Describes what is to be planned for."""

    shape: ModelShape
    """The model."""
    gpu: Accelerator
    """The device."""
    gpus: int
    """Number of devices."""

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
