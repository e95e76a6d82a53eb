"""`estimate`: memory, time and throughput of one layout, itemised."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from hfscale.facts.hardware import Accelerator, find_accelerator, peak_tflops
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.job import (
    Job,
    Method,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    Schedule,
    Task,
    splits_activations,
)
from hfscale.planner.memory import Memory, Peak, memory_of, node_host_gib, peak_of
from hfscale.planner.throughput import StepTime, step_time

SIGMAS_OF_80_PERCENT = 1.2816
"""Standard deviations of the normal distribution on either side of its mean that 80% of it are within."""
FITS_WORDS = ((0.95, "yes"), (0.75, "likely"), (0.25, "uncertain"), (0.0, "no"))
"""Least probability of each word for whether a run fits."""


def fits_word(probability: float) -> str:
    """Return the word for a probability that a run fits: `yes`, `likely`, `uncertain` or `no`."""
    return next(word for least, word in FITS_WORDS if probability >= least)


def spread(value: float, range_80: float) -> tuple[float, float]:
    """Return the range around a predicted value that holds for 80% of the published runs.

    Args:
        value (`float`): the value.
        range_80 (`float`): the error, in logarithm, that 80% of the published runs keep.
    """
    return value * math.exp(-range_80), value * math.exp(range_80)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Holds the memory and the time that a job is expected to need."""

    job: Job
    """The job that was estimated."""
    memory: Memory
    """Peak memory of the fullest rank, GiB."""
    time: StepTime
    """Duration of an optimizer step, seconds."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.memory.total <= self.job.gpu.memory_gib

    @property
    def fits_probability(self) -> float:
        """Probability that the peak is within the device's memory, from the errors of published peaks."""
        spread = find_framework(self.job.framework).memory_range / SIGMAS_OF_80_PERCENT
        return NormalDist(0.0, spread).cdf(math.log(self.job.gpu.memory_gib / self.memory.total))

    @property
    def fits_word(self) -> str:
        """The probability that it fits as a word (`fits_word`)."""
        return fits_word(self.fits_probability)

    @property
    def peak(self) -> Peak:
        """Which rank is the fullest, and when (`memory.peak_of`)."""
        return peak_of(self.job, find_framework(self.job.framework))

    @property
    def host_gib_per_node(self) -> float:
        """CPU memory of the fullest node for what is offloaded, loaded and saved, GiB (`memory.node_host_gib`)."""
        return node_host_gib(self.job)

    @property
    def memory_range(self) -> tuple[float, float]:
        """Range of the peak, GiB, that holds for 80% of the published peaks."""
        return spread(self.memory.total, find_framework(self.job.framework).memory_range)

    @property
    def time_range(self) -> tuple[float, float]:
        """Range of the step's duration, seconds, that holds for 80% of the published runs."""
        return spread(self.time.total, find_framework(self.job.framework).time_range)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Trained tokens per second and device."""
        return self.job.tokens_per_step / self.time.total / self.job.layout.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOPs (attention counted in full) over the dense peak of the format of the matrix products; None where
        no peak is known."""
        job = self.job
        peak = peak_tflops(job.gpu, "tf32" if job.precision == "fp32" else job.precision)
        if peak is None:
            return None
        lora = None if job.method == "full" else job.shape.lora_parameters(job.lora_rank, active=True)
        flops = job.shape.flops_per_token(job.seq_len, lora_parameters=lora)
        return self.tokens_per_s_per_gpu * flops / (peak * 1e12)

    def to_dict(self) -> dict[str, Any]:
        """Return the content that `hfscale estimate --json` prints, as a dictionary."""
        return {
            "memory_gib": {**asdict(self.memory), "total": self.memory.total},
            "memory_range_gib": list(self.memory_range),
            "peak": asdict(self.peak),
            "host_memory_gib_per_node": self.host_gib_per_node,
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "step_time_s": self.time.total,
            "step_time_range_s": list(self.time_range),
            "time_s": asdict(self.time),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
        }


def estimate(
    model: str | ModelShape,
    *,
    gpu: str | Accelerator,
    layout: ParallelLayout | Mapping[str, int],
    seq_len: int,
    micro_batch: int = 1,
    global_batch: int | None = None,
    hardware: Path | None = None,
    stack: str = "hf",
    zero: int = 0,
    recompute: Recompute = "none",
    precision: Precision = "bf16",
    pure: bool = False,
    compile: bool = False,
    method: Method = "full",
    lora_rank: int = 16,
    optimizer: Optimizer = "adamw",
    offload: Offload = "none",
    virtual_stages: int = 1,
    schedule: Schedule = "1f1b",
    sequence_parallel: bool | None = None,
    loss_parallel: bool | None = None,
    expert_parallel: int = 1,
    overlapped_experts: bool = False,
    reshard: bool = True,
    flash_attention: bool = True,
    fused_loss: bool = False,
    compiled_loss: bool = True,
    rowwise_fp8: bool = False,
    task: Task = "text",
    num_generations: int = 8,
    max_completion_length: int = 512,
    beta: float = 0.0,
    precompute_ref_log_probs: bool = False,
    generation_rounds: int = 1,
    gpus_per_node: int = 8,
    network_gb_s: float | None = None,
) -> Estimate:
    """Estimate memory and time of one layout.

    Args:
        model (`str` or `ModelShape`): a built-in name, a hub id, a `config.json` or its folder; or a shape.
        gpu (`str` or `Accelerator`): a name of `hardware.toml` or of the user's hardware file; or an accelerator.
        layout (`ParallelLayout` or `Mapping`): ranks along each axis.
        seq_len (`int`): tokens per sequence.
        micro_batch (`int`): sequences per data-parallel rank and micro-batch.
        global_batch (`int`, *optional*): sequences per step; by default one micro-batch per data-parallel rank.
        hardware (`Path`, *optional*): a file written by `hfscale plan --calibrate`; by default the user's own.
        stack (`str`): the training framework whose constants are used: `hf`, `titan` or `megatron`.
        zero (`int`): what data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also
            parameters (FSDP).
        recompute (`str`): activation recomputation: `none`, `selective` or `full`.
        precision (`str`): format of the matrix products: `fp32`, `bf16`, `fp16` or `fp8`.
        pure (`bool`): whether parameters, gradients and optimizer states are in that format too.
        compile (`bool`): whether the model runs under torch.compile.
        method (`str`): which parameters train: `full`, `lora` or `qlora`.
        lora_rank (`int`): rank of the adapters.
        optimizer (`str`): `adamw`, `adamw_bf16`, `adamw_8bit`, `sgd`, `sgd_momentum`, `adafactor` or `muon`.
        offload (`str`): what is kept in the CPU's memory: `none`, `optimizer` (states) or `full`.
        virtual_stages (`int`): pipeline stages per rank.
        schedule (`str`): pipeline schedule: `1f1b`, `gpipe`, `zero_bubble`, `zbv` or `dualpipev`.
        sequence_parallel (`bool`, *optional*): whether tensor-parallel ranks also split norms and residuals along the
            sequence; by default what the framework does with this layout.
        loss_parallel (`bool`, *optional*): whether the loss is computed on logits that stay split over the
            tensor-parallel ranks; by default what the framework does with this layout.
        expert_parallel (`int`): ranks that share the experts of a layer.
        overlapped_experts (`bool`): whether tokens are sent to their experts while another micro-batch is computed.
        reshard (`bool`): whether ZeRO-3 frees gathered parameters after the forward pass.
        flash_attention (`bool`): whether attention scores are never written to memory.
        fused_loss (`bool`): whether the loss never holds all logits at once (Liger).
        compiled_loss (`bool`): whether torch.compile, if used, compiles the loss too.
        rowwise_fp8 (`bool`): whether fp8 scales are per row instead of per tensor.
        task (`str`): what a step trains on: `text`, or with TRL `sft`, `dpo` or `grpo`.
        num_generations (`int`): completions per prompt, with `grpo`.
        max_completion_length (`int`): tokens of a sequence that are generated, with `grpo`.
        beta (`float`): coefficient of the KL divergence from the reference model, with `grpo`.
        precompute_ref_log_probs (`bool`): whether the reference's log-probabilities are computed before the training,
            with `dpo`.
        generation_rounds (`int`): rounds in which the completions of a step are generated, with `grpo`.
        gpus_per_node (`int`): GPUs that NVLink or PCIe connects.
        network_gb_s (`float`, *optional*): bandwidth between nodes per GPU and direction, GB/s; by default that of the
            vendor's reference node.

    Raises:
        UsageError: an option is unknown or out of range.
        LayoutError: sizes do not fit together.
        UnknownHardwareError: the GPU is in no table.
        UnsupportedModelError: the model cannot be found, or its family or a key of its config is not supported.
        ConfigFileError: the model config or the hardware file cannot be read, or is wrong.
        MissingDependencyError: the model is on the hub, and huggingface_hub is not installed.
    """
    axes = layout if isinstance(layout, ParallelLayout) else ParallelLayout(**layout)
    job = Job(
        shape=find_model(model) if isinstance(model, str) else model,
        gpu=find_accelerator(gpu, hardware) if isinstance(gpu, str) else gpu,
        layout=axes,
        seq_len=seq_len,
        micro_batch=micro_batch,
        global_batch=micro_batch * axes.data_parallel_size if global_batch is None else global_batch,
        framework=stack,
        zero=zero,
        recompute=recompute,
        precision=precision,
        pure=pure,
        compile=compile,
        method=method,
        lora_rank=lora_rank,
        optimizer=optimizer,
        offload=offload,
        virtual_stages=virtual_stages,
        schedule=schedule,
        sequence_parallel=splits_activations(stack, axes) if sequence_parallel is None else sequence_parallel,
        loss_parallel=splits_activations(stack, axes) if loss_parallel is None else loss_parallel,
        expert_parallel=expert_parallel,
        overlapped_experts=overlapped_experts,
        reshard=reshard,
        flash_attention=flash_attention,
        fused_loss=fused_loss,
        compiled_loss=compiled_loss,
        rowwise_fp8=rowwise_fp8,
        task=task,
        num_generations=num_generations,
        max_completion_length=max_completion_length,
        beta=beta,
        precompute_ref_log_probs=precompute_ref_log_probs,
        generation_rounds=generation_rounds,
        gpus_per_node=gpus_per_node,
        network_gb_s=network_gb_s,
    )
    find_framework(job.framework)
    job.check()
    return estimate_job(job)


def estimate_job(job: Job) -> Estimate:
    """Estimate memory and time of a job whose sizes were checked (`Job.check`).

    Raises:
        UsageError: the framework is unknown, no peak of the device is known for the precision, the bandwidth between
            nodes is not above 0, or the LoRA rank is below 1.
    """
    framework = find_framework(job.framework)
    return Estimate(job=job, memory=memory_of(job, framework), time=step_time(job, framework, shared_constants()))


def with_recompute_that_fits(job: Job) -> Job:
    """Return the job with the least recomputation whose memory fits, or with full recomputation where nothing fits.

    Raises:
        UsageError: the framework is unknown.
    """
    framework = find_framework(job.framework)
    for recompute in ("none", "selective"):
        trial = replace(job, recompute=recompute)
        if memory_of(trial, framework).total <= job.gpu.memory_gib:
            return trial
    return replace(job, recompute="full", overlapped_experts=False)
