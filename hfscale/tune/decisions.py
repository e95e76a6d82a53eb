"""What `hfscale tune` decides: which configurations run, which of them go on, and how to correct the hardware row."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfscale.facts.hardware import Accelerator
from hfscale.planner.advice import simplicity
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.frameworks import shared_constants
from hfscale.planner.job import Job, strategy_of
from hfscale.planner.kernels import DEFAULT_ACHIEVED
from hfscale.planner.launchable import why_not
from hfscale.planner.network import Network
from hfscale.planner.plan import Choice, Plan

SAME_LAYOUT = 1.1
"""Factor on the predicted time of each further micro-batch of a layout: another layout that is predicted to be at most
this much slower tells more."""
EQUAL = 1.1
"""Ratio of predicted times that the estimate cannot tell apart: the simpler configuration is run first."""
MAX_MEMORY_RATIO = 1.05
"""Part of a device's memory that the estimate of a configuration may need: the estimate may be too high."""
CORRECTIONS = tuple(2.0 ** (power / 4) for power in range(-20, 21))
"""Factors on the rates of a hardware row that are tried: 1/32 to 32."""
PRIOR = 0.01
"""Weight of the squared logarithm of a factor against the squared errors: one that changes little stays at 1."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A configuration that can be run."""

    name: str
    """A short name, which is also the name of its folder."""
    choice: Choice
    """The job with its estimate."""

    @property
    def predicted_tokens_per_s(self) -> float:
        """Tokens per second of all processes together."""
        estimate = self.choice.estimate
        return estimate.tokens_per_s_per_gpu * estimate.job.layout.world_size


def candidates(plan: Plan, number: int, *, can_run: Callable[[Job], bool]) -> list[Candidate]:
    """Return the best layouts and micro-batches of a plan, the fastest first; of equal ones the simplest.

    Args:
        plan (`Plan`): the plan, with all its choices.
        number (`int`): how many to return; fewer if there are not as many.
        can_run (`Callable[[Job], bool]`): whether the user's script can run a job, which some recipe can run.
    """
    found: list[tuple[tuple[float, ...], Candidate]] = []
    for choice in plan.choices:
        if why_not(choice.estimate.job) is not None or not can_run(choice.estimate.job):
            continue
        estimates = [choice.estimate, *_other_micro_batches(choice.estimate.job)]
        for rank, estimate in enumerate(sorted(estimates, key=lambda one: one.time.total)):
            time_s = estimate.time.total * SAME_LAYOUT**rank
            order = (round(math.log(time_s, EQUAL)), *simplicity(estimate), time_s)
            found.append(
                (
                    order,
                    Candidate(
                        name=name_of(estimate.job), choice=replace(choice, estimate=estimate)
                    ),
                )
            )
    return [candidate for _, candidate in sorted(found, key=lambda pair: pair[0])[:number]]


def _other_micro_batches(job: Job) -> Iterator[Estimate]:
    """The job with half and with twice the micro-batch, where the batch divides. A pipeline keeps its micro-batch: its
    schedule needs a certain number of them."""
    if job.layout.pp > 1:
        return
    for size in (job.micro_batch // 2, job.micro_batch * 2):
        if size >= 1 and job.global_batch // job.data_parallel % size == 0:
            estimate = estimate_job(replace(job, micro_batch=size))
            if estimate.memory.needed <= MAX_MEMORY_RATIO * job.gpu.memory_gib:
                yield estimate


def name_of(job: Job) -> str:
    """Return a short name of a job, such as `fsdp2-shard2-mb4-full`."""
    layout = job.layout
    axes = {
        "rep": layout.dp_replicate,
        "shard": layout.dp_shard,
        "cp": layout.cp,
        "tp": layout.tp,
        "pp": layout.pp,
    }
    has_one_axis = max(layout.dp_replicate, layout.dp_shard) == layout.world_size
    parts = [
        strategy_of(job),
        *(f"{axis}{size}" for axis, size in axes.items() if size > 1 and not has_one_axis),
    ]
    if job.expert_parallel > 1:
        parts.append(f"ep{job.expert_parallel}")
    if layout.pp > 1:
        parts.append(job.schedule_name.lower())
    parts.append(f"mb{job.micro_batch}")
    parts += [job.activation_checkpointing] if job.activation_checkpointing != "none" else []
    parts += [f"{job.offload}-offload"] if job.offload != "none" else []
    return "-".join(parts)


def successive_halving(
    names: Sequence[str],
    steps: int,
    run: Callable[[str, int], float | None],
    *,
    is_over: Callable[[], bool],
) -> None:
    """Run all configurations, then the faster half for twice as many steps, and so on until two have been compared.

    A configuration that becomes slower in a longer run loses its place to one that was left out before.

    Args:
        names (`Sequence[str]`): the configurations.
        steps (`int`): optimizer steps of the first round.
        run (`Callable[[str, int], float | None]`): runs a configuration and returns its tokens per second; None if it
            failed.
        is_over (`Callable[[], bool]`): whether no further run may begin.
    """
    measured: dict[str, float] = {}
    running = list(names)
    while True:
        for name in running:
            if is_over():
                return
            rate = run(name, steps)
            measured.pop(name, None)
            if rate is not None:
                measured[name] = rate
        if len(running) <= 2 or len(measured) < 2:
            return
        fastest = sorted(measured, key=lambda name: -measured[name])
        running = fastest[: math.ceil(len(running) / 2)]
        steps *= 2


def number_of_runs(configurations: int) -> int:
    """Count the runs of `successive_halving` if none fails."""
    runs = configurations
    while configurations > 2:
        configurations = math.ceil(configurations / 2)
        runs += configurations
    return runs


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A hardware row whose rates were changed so that estimates are close to measurements."""

    gpu: Accelerator
    """The corrected row."""
    rate: float
    """Factor on the rates of matrix products and memory."""
    link: float
    """Factor on the bandwidth of the links inside the node."""
    error_before: float
    """Median relative error of the estimates before."""
    error_after: float
    """Median relative error of the estimates after."""


def correct(
    gpu: Accelerator, measured: Sequence[tuple[Job, float]], *, name: str, source: str
) -> Correction:
    """Correct the rates of a hardware row from measured runs: one factor for computation, one for communication.

    Args:
        gpu (`Accelerator`): the row that the jobs were estimated with.
        measured (`Sequence[tuple[Job, float]]`): jobs and their measured tokens per second, at least one.
        name (`str`): the name of the new row.
        source (`str`): what it says about where it comes from.
    """
    has_links = any(job.layout.world_size > 1 for job, _ in measured) and len(measured) > 1
    best = (1.0, 1.0)
    least = math.inf
    for rate in CORRECTIONS:
        for link in CORRECTIONS if has_links else (1.0,):
            errors = _errors(_scaled(gpu, rate, link), measured)
            loss = sum(error**2 for error in errors) + PRIOR * (
                math.log(rate) ** 2 + math.log(link) ** 2
            )
            if loss < least:
                least = loss
                best = (rate, link)
    base = gpu.base or (gpu.name if gpu.name != name else None)
    row = _scaled(gpu, *best)
    corrected = replace(row, name=name, base=base, source=source, aliases=(), device_names=())
    before, after = (
        [abs(math.expm1(e)) for e in _errors(one, measured)] for one in (gpu, corrected)
    )
    return Correction(
        gpu=corrected,
        rate=best[0],
        link=best[1],
        error_before=statistics.median(before),
        error_after=statistics.median(after),
    )


def _errors(gpu: Accelerator, measured: Sequence[tuple[Job, float]]) -> list[float]:
    """Logarithms of predicted over measured speed."""
    jobs = [(replace(job, gpu=gpu), rate) for job, rate in measured]
    return [
        math.log(job.tokens_per_step / estimate_job(job).time.total / rate) for job, rate in jobs
    ]


def _scaled(gpu: Accelerator, rate: float, link: float) -> Accelerator:
    """The row with achieved rates times the factors; where it has none, times those that estimates assume."""
    shared = shared_constants()
    network = Network.of(gpu, node_size=1, network_gb_s=None, shared=shared)
    share = (
        gpu.achieved_bf16_tflops / gpu.bf16_tflops
        if gpu.achieved_bf16_tflops and gpu.bf16_tflops
        else None
    )
    share = share or DEFAULT_ACHIEVED
    fp32 = gpu.tf32_tflops or gpu.fp32_tflops
    achieved = {
        "achieved_bf16_tflops": gpu.achieved_bf16_tflops
        or (gpu.bf16_tflops and gpu.bf16_tflops * share),
        "achieved_fp16_tflops": gpu.achieved_fp16_tflops
        or (gpu.fp16_tflops and gpu.fp16_tflops * share),
        "achieved_fp32_tflops": gpu.achieved_fp32_tflops or (fp32 and fp32 * share),
        "achieved_memory_tb_s": gpu.achieved_memory_tb_s or gpu.memory_tb_s * shared.memory_rate,
    }
    scaled: dict[str, Any] = {
        key: value * rate for key, value in achieved.items() if value is not None
    }
    if link != 1.0:
        scaled["achieved_link_gb_s"] = link * network.link_bytes_s * network.shared.link_rate / 1e9
        scaled["hop_us"] = network.shared.hop_s * 1e6 / link
    return replace(gpu, **scaled)
