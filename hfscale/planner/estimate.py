"""One layout's memory, time and throughput, itemised."""

from dataclasses import dataclass, replace

from hfscale.facts.hardware import peak_tflops
from hfscale.planner.frameworks import shared, stack
from hfscale.planner.job import Job
from hfscale.planner.memory import Memory, memory_of
from hfscale.planner.model_view import view_of
from hfscale.planner.states import trained_parameters
from hfscale.planner.throughput import StepTime, step_time


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a job is expected to do."""

    job: Job
    """What was estimated."""
    memory: Memory
    """GiB of the fullest rank."""
    time: StepTime
    """Seconds of an optimizer step."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.memory.total <= self.job.gpu.memory_gib

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Trained tokens per second and device."""
        return self.job.global_batch * self.job.seq_len / self.time.total / self.job.layout.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOPs, attention in full, over the dense peak of the format that multiplies; None where none is
        known."""
        job = self.job
        peak = peak_tflops(job.gpu, "tf32" if job.precision == "fp32" else job.precision)
        if peak is None:
            return None
        lora = None if job.method == "full" else round(trained_parameters(view_of(job.shape), job))
        flops = job.shape.flops_per_token(job.seq_len, lora_parameters=lora)
        return self.tokens_per_s_per_gpu * flops / (peak * 1e12)


def estimate_job(job: Job) -> Estimate:
    """Memory and time of a job whose sizes were checked."""
    view, constants = view_of(job.shape), stack(job.stack)
    return Estimate(job=job, memory=memory_of(view, job, constants), time=step_time(view, job, constants, shared()))


def with_recompute_that_fits(job: Job) -> Job:
    """The job with the least recomputation whose memory fits; with full recomputation where nothing fits."""
    view, constants = view_of(job.shape), stack(job.stack)
    for recompute in ("none", "selective"):
        trial = replace(job, recompute=recompute)
        if memory_of(view, trial, constants).total <= job.gpu.memory_gib:
            return trial
    return replace(job, recompute="full", overlapped_experts=False)
