"""`estimate`: memory, time and throughput of one layout, itemised."""

import math
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

from hfscale.core.options import options_of
from hfscale.core.spelling import spelled
from hfscale.errors import LayoutError
from hfscale.facts.batch_schedule import BatchSchedule
from hfscale.facts.hardware import peak_dtype, peak_tflops
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.model_shape import ModelShape
from hfscale.facts.models import find_model
from hfscale.facts.own_hardware import find_accelerator
from hfscale.facts.support import check_support
from hfscale.planner.batch_stages import planned_schedule, why_not_piped
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.images import image_flops
from hfscale.planner.job import Job, splits_activations
from hfscale.planner.launchable import compiles_by_default, describe
from hfscale.planner.memory import (
    Memory,
    Peak,
    adapter_parameters,
    allocated_gib,
    assumed_host_gib,
    memory_of,
    node_host_gib,
    peak_of,
)
from hfscale.planner.network import datasheet_network_gb_s, with_link
from hfscale.planner.option_fields import python_options, with_options
from hfscale.planner.options import EstimateOptions, LayoutOptions
from hfscale.planner.request import other_models
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


SLOWER_PCIE = 3.0
"""How many times slower links over PCIe may be than they are assumed to be: a card may have four to eight of sixteen
lanes, and an older machine PCIe 3 (AnswerDotAI/fsdp_qlora, benchmarks_03_2024.md: 3 GB/s on two RTX 3090)."""
SLOWER_NETWORK = 2.0
"""The same of the network between nodes: many clusters have four cards where the vendor's reference node has eight."""


def with_slower_links(job: Job) -> Job:
    """Return a job with the slowest links that its machine may have, where they are neither given nor measured.

    Args:
        job (`Job`): the run.
    """
    gpu = job.gpu
    if job.layout.world_size == 1:
        return job
    if gpu.link_gb_s is None and gpu.achieved_link_gb_s is None and gpu.host_gb_s is not None:
        # It stands for the link alone, unless states are offloaded over the same lanes
        gpu = replace(gpu, host_gb_s=gpu.host_gb_s / SLOWER_PCIE)
    network = job.network_gb_s
    has_nodes = job.layout.world_size > job.gpus_per_node
    if has_nodes and network is None and gpu.achieved_network_gb_s is None:
        network = datasheet_network_gb_s(gpu, job.gpus_per_node) / SLOWER_NETWORK
    return replace(job, gpu=gpu, network_gb_s=network)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Describes the steps of one global batch of a schedule."""

    global_batch: int
    """Sequences per step."""
    from_tokens: int
    """Tokens seen when it begins."""
    micro_batches: int
    """Micro-batches per step and data-parallel rank."""
    step_time_s: float
    """Duration of a step, seconds."""
    tokens_per_s_per_gpu: float
    """Trained tokens per second and device."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Holds the memory and the time that a job is expected to need."""

    job: Job
    """The job that was estimated; with a batch schedule, that of its largest batch."""
    memory: Memory
    """Peak memory of the fullest rank, GiB."""
    time: StepTime
    """Duration of an optimizer step, seconds."""
    stages: tuple[Stage, ...] = ()
    """Each global batch of a batch schedule; none where the batch is constant."""

    @property
    def fits(self) -> bool:
        """Whether what is needed is within the device's memory, and a node has enough CPU memory."""
        return self.memory.needed <= self.job.gpu.memory_gib and self.fits_host

    @property
    def host_gib_assumed(self) -> float:
        """CPU memory that a node is assumed to have, GiB."""
        ranks = min(self.job.gpus_per_node, self.job.layout.world_size)
        return assumed_host_gib(self.job.gpu) * ranks

    @property
    def fits_host(self) -> bool:
        """Whether what is offloaded and loaded is within a node's CPU memory; not known of other stacks."""
        return self.job.stack != "hf" or self.host_gib_per_node <= self.host_gib_assumed

    @property
    def fits_probability(self) -> float:
        """Probability that the peak is within the device's memory, from the errors of published peaks; 0 where a node
        has too little CPU memory."""
        if not self.fits_host:
            return 0.0
        framework = find_framework(self.job.stack)
        error = framework.memory_range
        # What Megatron's experts keep differs between its versions (published peaks are up to 9% higher than planned)
        if self.job.stack == "megatron" and self.job.shape.moe is not None:
            error = framework.reading_range
        return NormalDist(0.0, error / SIGMAS_OF_80_PERCENT).cdf(
            math.log(self.job.gpu.memory_gib / self.memory.needed)
        )

    @property
    def fits_word(self) -> str:
        """The probability that it fits as a word (`fits_word`)."""
        return fits_word(self.fits_probability)

    @property
    def peak(self) -> Peak:
        """Which rank is the fullest, and when (`memory.peak_of`)."""
        return peak_of(self.job, find_framework(self.job.stack))

    @property
    def host_gib_per_node(self) -> float:
        """CPU memory of the fullest node for what is offloaded and loaded, GiB (`memory.node_host_gib`)."""
        return node_host_gib(self.job, saves=False)

    @property
    def saving_host_gib_per_node(self) -> float:
        """The same with the copy of a background save; with less, training waits for each save."""
        return node_host_gib(self.job)

    @property
    def needed_range(self) -> tuple[float, float]:
        """Range of what is needed, GiB, that holds for 80% of the published peaks of tensors."""
        return spread(self.memory.needed, find_framework(self.job.stack).memory_range)

    @property
    def memory_range(self) -> tuple[float, float]:
        """Range of the peak that nvidia-smi shows, GiB, that holds for 80% of the published ones."""
        framework = find_framework(self.job.stack)
        error = framework.memory_range if self.job.compile else framework.reading_range
        return spread(self.memory.total, error)

    @property
    def time_range(self) -> tuple[float, float]:
        """Range of the step's duration, seconds, that holds for 80% of the published runs.

        Where the links between the devices are assumed, its upper end is that of slower ones.
        """
        framework = find_framework(self.job.stack)
        shared = shared_constants()
        error = framework.time_range
        if self.job.shape.moe is not None:
            error = max(error, shared.moe_time_range)
        fastest, slowest = spread(self.time.total, error)
        job = with_slower_links(self.job)
        if job != self.job:
            slowest = spread(step_time(job, framework, shared).total, error)[1]
        return fastest, slowest

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Trained tokens per second and device."""
        return self.job.tokens_per_step / self.time.total / self.job.layout.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOPs (attention counted in full) over the dense peak of the format of the matrix products (`bf16` for
        fp8, see `peak_dtype`); None where no peak is known."""
        job = self.job
        peak = peak_tflops(
            job.gpu, "tf32" if job.precision == "fp32" else peak_dtype(job.precision)
        )
        if peak is None:
            return None
        lora = None if job.method == "full" else adapter_parameters(job, active=True)
        flops = job.shape.flops_per_token(job.seq_len, lora_parameters=lora)
        if job.tower is not None:
            flops += image_flops(job) / job.tokens
        return self.tokens_per_s_per_gpu * flops / (peak * 1e12)

    def to_dict(self) -> dict[str, Any]:
        """Return the content that `hfscale estimate --json` prints, as a dictionary."""
        return {
            "memory_gib": {**asdict(self.memory), "total": self.memory.total},
            "memory_range_gib": list(self.memory_range),
            "memory_allocated_gib": allocated_gib(self.memory),
            "memory_needed_gib": self.memory.needed,
            "memory_reserved_gib": self.memory.total - self.memory.context,
            "peak": asdict(self.peak),
            "host_memory_gib_per_node": self.host_gib_per_node,
            "host_memory_saving_gib_per_node": self.saving_host_gib_per_node,
            "host_memory_assumed_gib_per_node": self.host_gib_assumed,
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "step_time_s": self.time.total,
            "step_time_range_s": list(self.time_range),
            "time_s": asdict(self.time),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            **({"batch_schedule": [asdict(stage) for stage in self.stages]} if self.stages else {}),
        }


@with_options(EstimateOptions)
def estimate(model: str | ModelShape, **options: Any) -> Estimate:
    """Estimate memory and time of one layout.

    Args:
        model (`str` or `ModelShape`): a built-in name, a hub id, a `config.json` or its folder; or a shape.
        **options: the options, see below.

    Raises:
        UsageError: an option is unknown or out of range.
        LayoutError: sizes do not fit together.
        UnknownHardwareError: the GPU is in no table.
        UnsupportedModelError: the model cannot be found, or its family or a key of its config is not supported.
        ConfigFileError: the model config or the hardware file cannot be read, or is wrong.
        MissingDependencyError: the model is on the hub, and huggingface_hub is not installed.
    """
    with python_options(EstimateOptions, "estimate", options) as chosen:
        return estimate_with(model, chosen)


def estimate_with(model: str | ModelShape, options: EstimateOptions) -> Estimate:
    """Estimate as `estimate`, whose options were checked (`make_options`)."""
    gpu = options.gpu
    if isinstance(gpu, str):
        gpu = find_accelerator(gpu, options.hardware)
    layout, expert_parallel = _layout_of(options)
    # Memory is that of the largest batch, which accumulates most
    schedule = None
    if options.batch_schedule is not None:
        schedule = planned_schedule(
            options.batch_schedule, seq_len=options.seq_len, global_batch=options.global_batch
        )
    by_default = {
        "global_batch": options.micro_batch * layout.data_parallel_size,
        "liger": False,
        "compile": False,
        "sequence_parallel": splits_activations(options.stack, layout, expert_parallel),
        "loss_parallel": splits_activations(options.stack, layout, expert_parallel),
    }
    values = {name: getattr(options, name) for name in options_of(LayoutOptions)}
    values |= {name: value for name, value in by_default.items() if values[name] is None}
    values["expert_parallel"] = expert_parallel
    if schedule is not None:
        values["global_batch"] = max(schedule.sizes)
        _check_batches(schedule, options.micro_batch * layout.data_parallel_size)
    shape = model
    if isinstance(shape, str):
        shape = find_model(shape, counts_tower=options.task == "vision")
    job = Job(
        **values,
        shape=shape,
        gpu=with_link(gpu, options.link_gb_s),
        layout=layout,
        **other_models(model, options),
    )
    find_framework(job.stack)
    job.check()
    if options.compile is None and compiles_by_default(job):
        job = replace(job, compile=True, compiled_loss=False)
    found = estimate_job(job)
    return found if schedule is None else replace(found, stages=_stages(job, schedule))


def _check_batches(schedule: BatchSchedule, share: int) -> None:
    """Raise a `LayoutError` if a batch is not a multiple of the sequences of one micro-batch of all ranks."""
    for batch in schedule.sizes:
        if batch % share:
            given = spelled("batch_schedule", schedule.text())
            raise LayoutError(
                f"{given} has a batch of {batch}, which is not a multiple of the {share} sequences of a micro-batch "
                f"of all data-parallel ranks: use {max(share, round(batch / share) * share)}"
            )


def _stages(job: Job, schedule: BatchSchedule) -> tuple[Stage, ...]:
    """Each global batch of a schedule with the job's layout."""
    check_support(replace(describe(job), batch_schedule=True), "batch_schedule")
    stopped = why_not_piped(job, schedule)
    if stopped is not None:
        raise LayoutError(f"{stopped}: give other batches")
    stages = []
    for stage in schedule.stages:
        of_stage = replace(job, global_batch=stage.batch)
        found = estimate_job(of_stage)
        stages.append(
            Stage(
                global_batch=stage.batch,
                from_tokens=stage.after * job.seq_len,
                micro_batches=of_stage.micro_batches,
                step_time_s=found.time.total,
                tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
            )
        )
    return tuple(stages)


def _layout_of(options: EstimateOptions) -> tuple[ParallelLayout, int]:
    """The layout and the ranks that share experts, which the sizes of a plan's layout contain as `ep`."""
    if isinstance(options.layout, ParallelLayout):
        return options.layout, options.expert_parallel
    sizes = dict(options.layout)
    expert_parallel = sizes.pop("ep", options.expert_parallel)
    if options.expert_parallel not in (1, expert_parallel):
        raise LayoutError(
            f"{spelled('layout')} has ep {expert_parallel}, and {spelled('expert_parallel')} is "
            f"{options.expert_parallel}: give one of them"
        )
    return ParallelLayout(**sizes), expert_parallel


def estimate_job(job: Job) -> Estimate:
    """Estimate memory and time of a job whose sizes were checked (`Job.check`).

    Raises:
        UsageError: the framework is unknown, no peak of the device is known for the precision, the bandwidth between
            nodes is not above 0, or the LoRA rank is below 1.
    """
    framework = find_framework(job.stack)
    return Estimate(
        job=job,
        memory=memory_of(job, framework),
        time=step_time(job, framework, shared_constants()),
    )


def with_least_checkpointing(job: Job) -> Job:
    """Return the job with the least recomputation whose memory fits, or with full recomputation where nothing fits.

    Raises:
        UsageError: the framework is unknown.
    """
    framework = find_framework(job.stack)
    for checkpointing in ("none", "selective"):
        trial = replace(job, activation_checkpointing=checkpointing)
        if memory_of(trial, framework).needed <= job.gpu.memory_gib:
            return trial
    return replace(job, activation_checkpointing="full", overlapped_experts=False)
