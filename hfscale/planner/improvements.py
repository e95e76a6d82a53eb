"""What would make a run fit or faster, each change with its memory and speed computed for the case at hand."""

from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from hfscale.errors import HfScaleError
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.job import Job, strategy_of
from hfscale.planner.launchable import can_fuse_loss, why_not
from hfscale.planner.options import ActivationCheckpointing, Offload, Optimizer
from hfscale.planner.request import PlanRequest
from hfscale.planner.search import best_of_layout, can_hold_states, lower_precision, search

MAX_GPU_DOUBLINGS = 6
"""How often the number of GPUs is doubled where nothing fits."""
MIN_SEQ_LEN = 512
"""Shortest sequence that is tried where nothing fits."""
OFFLOADING_TASKS = ("sft", "dpo")
"""Tasks whose recipes can keep activations in the CPU's memory."""
MIN_GAIN = 0.02
"""Relative change of speed or memory below which a change is left out."""


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """Describes a change of the first choice, or of the request where nothing fits, and what it gives."""

    change: str
    """The change, with its flag."""
    run: str
    """How the run then is: layout, micro-batch and recomputation where they change too."""
    memory_gib: float
    """Peak memory per GPU, GiB."""
    fits_probability: float
    """Probability that it fits."""
    tokens_per_s_per_gpu: float
    """Trained tokens per second and GPU."""
    speedup: float | None
    """Speed relative to the first choice; None where there is none."""
    changes_results: bool = False
    """Whether the change alters what the training computes."""

    def to_dict(self) -> dict[str, Any]:
        """Return an element of `improvements` in the JSON of `hfscale plan --json`, as a dictionary."""
        return asdict(self)


def improvements(request: PlanRequest, best: Estimate | None) -> list[Improvement]:
    """Compute what would make the first choice faster or smaller, or, where nothing fits, what would make it fit.

    Args:
        request (`PlanRequest`): what was planned for.
        best (`Estimate`, *optional*): the first choice; None if nothing fits.
    """
    if best is None:
        return _to_fit(request)
    return (
        (_without_offload(request, best) if best.job.offload != "none" else [])
        + _faster(best)
        + _smaller(best)
    )


def _described(
    change: str, found: Estimate, best: Estimate | None, *, changes_results: bool = False
) -> Improvement:
    job = found.job
    offload = f", {job.offload} offload" if job.offload != "none" else ""
    batch = f"micro-batch {job.micro_batch}"
    run = f"{strategy_of(job)}{offload}, {job.layout_summary}, {batch}, {job.activation_checkpointing}"
    return Improvement(
        change=change,
        run=run,
        memory_gib=found.memory.needed,
        fits_probability=found.fits_probability,
        tokens_per_s_per_gpu=found.tokens_per_s_per_gpu,
        speedup=None if best is None else found.tokens_per_s_per_gpu / best.tokens_per_s_per_gpu,
        changes_results=changes_results,
    )


# -- something fits ---------------------------------------------------------------------------------------------------


def _faster(best: Estimate) -> list[Improvement]:
    """Changes with which the layout of the first choice, with the best micro-batch and recomputation, is faster."""
    job = best.job
    tried: list[tuple[str, Job, bool]] = []
    if not job.liger and can_fuse_loss(job):
        tried.append(("fused loss: --liger", replace(job, liger=True), False))
    if not job.compile and job.layout.pp == 1:
        tried.append(("torch.compile: --compile", replace(job, compile=True), False))
    if job.precision == "bf16" and job.gpu.fp8_tflops:
        tried.append(("fp8 matrix products: --precision fp8", replace(job, precision="fp8"), True))
    if job.method == "full" and job.optimizer == "adamw":
        tried.append(
            ("8-bit optimizer: --optimizer adamw_8bit", replace(job, optimizer="adamw_8bit"), True)
        )
        if not job.pure_bf16 and job.precision == "bf16" and job.stack != "megatron":
            tried.append(
                ("bf16 parameters and states: --pure-bf16", replace(job, pure_bf16=True), True)
            )
    tried.append(
        (f"twice the batch: --global-batch {2 * job.global_batch}", _with_batch(job, 2), True)
    )
    found = []
    least = best.tokens_per_s_per_gpu * (1 + MIN_GAIN)
    for change, trial, changes_results in tried:
        # A change is of no use if the recipes run the choice, but not what it becomes.
        if why_not(trial) is not None and why_not(job) is None and not trial.pure_bf16:
            continue
        estimate, _ = best_of_layout(trial, fused=False)
        if estimate is None or not estimate.fits_host:
            continue
        if estimate.tokens_per_s_per_gpu > least:
            found.append(_described(change, estimate, best, changes_results=changes_results))
    return sorted(found, key=lambda item: -(item.speedup or 0.0))


def _without_offload(request: PlanRequest, best: Estimate) -> list[Improvement]:
    """Changes of the request with which the model needs no memory of the CPUs: the first choice is too large."""
    tried: list[tuple[str, Estimate | None, bool]] = []
    if request.method == "full" and request.task == "text":
        adapters = replace(request, method="lora", liger=None)
        tried.append(("adapters: --method lora", _without(adapters, request.gpus), True))
    gpus = request.gpus
    for _ in range(MAX_GPU_DOUBLINGS):
        gpus *= 2
        if (found := _without(request, gpus)) is not None:
            tried.append((f"more GPUs: --gpus {gpus}", found, False))
            break
    return [
        _described(change, found, best, changes_results=changes_results)
        for change, found, changes_results in tried
        if found is not None
    ]


def _without(request: PlanRequest, gpus: int) -> Estimate | None:
    """The fastest estimate of a request that needs no offload; None if there is none."""
    try:
        found, _ = search(request, gpus)
    except HfScaleError:
        return None
    return next((estimate for estimate in found if estimate.job.offload == "none"), None)


def _with_batch(job: Job, factor: int) -> Job:
    return replace(job, global_batch=factor * job.global_batch)


def _smaller(best: Estimate) -> list[Improvement]:
    """Changes with which the first choice, unchanged otherwise, needs less memory."""
    job = best.job
    tried: list[tuple[str, Job]] = []
    if not job.liger and can_fuse_loss(job):
        tried.append(("fused loss: --liger", replace(job, liger=True)))
    if job.micro_batch > 1:
        half = job.micro_batch // 2
        tried.append((f"fewer sequences at once: {half}", replace(job, micro_batch=half)))
    order = get_args(ActivationCheckpointing)
    for more in order[order.index(job.activation_checkpointing) + 1 :]:
        if more == "selective" and job.activation_offload:
            continue
        recomputed = replace(job, activation_checkpointing=more, overlapped_experts=False)
        tried.append((f"recomputation {more}", recomputed))
    if job.task in OFFLOADING_TASKS and not job.activation_offload:
        trial = replace(job, activation_offload=True)
        if job.activation_checkpointing == "selective":
            trial = replace(trial, activation_checkpointing="full")
        tried.append(("activations in the CPU's memory: --activation-offload", trial))
    runs_in_deepspeed = job.stack == "hf" and job.layout.ranks_per_replica == 1
    if runs_in_deepspeed and job.offload == "none" and job.task == "text":
        offload: Offload = "full" if job.zero == 3 else "optimizer"
        trial = replace(job, offload=offload, zero=job.zero or 2, expert_parallel=1)
        tried.append((f"offload of {_offloaded(offload)}", trial))
    found = []
    for change, trial in tried:
        # A change is of no use if the recipes run the choice, but not what it becomes.
        if why_not(trial) is not None and why_not(job) is None:
            continue
        estimate = estimate_job(trial)
        if not estimate.fits_host:
            continue
        if estimate.memory.needed < best.memory.needed * (1 - MIN_GAIN):
            found.append(_described(change, estimate, best))
    return sorted(found, key=lambda item: -(item.speedup or 0.0))


def _offloaded(offload: Offload) -> str:
    return "all states to the CPU" if offload == "full" else "optimizer states to the CPU"


# -- nothing fits -----------------------------------------------------------------------------------------------------


def _to_fit(request: PlanRequest) -> list[Improvement]:
    """Changes of the request with which something fits, each with its first choice."""
    gpus = request.gpus
    tried: list[tuple[str, Estimate | None, bool]] = []
    if request.global_batch is not None and request.global_batch % gpus:
        batch = -(-request.global_batch // gpus) * gpus
        found_with_it = _first(replace(request, global_batch=batch), gpus)
        tried.append((f"larger batch: --global-batch {batch}", found_with_it, True))
    if request.method == "full" and request.task == "text":
        adapters = replace(request, method="lora", liger=None)
        tried.append(("adapters: --method lora", _first(adapters, gpus), True))
        tried.append(
            ("adapters: --method qlora", _first(replace(adapters, method="qlora"), gpus), True)
        )
    # It changes no result, but needs memory of the CPUs
    if request.task in OFFLOADING_TASKS and not request.activation_offload:
        offloaded = replace(request, activation_offload=True)
        change = "activations in the CPU's memory: --activation-offload"
        tried.append((change, _first(offloaded, gpus), False))
    tried.append(("shorter sequences", _with_shorter_sequences(request), True))
    tried.append(("more GPUs", _with_more_gpus(request), False))
    found = []
    for change, estimate, changes_results in tried:
        if estimate is None:
            continue
        if estimate.job.layout.world_size != gpus:
            change = f"more GPUs: --gpus {estimate.job.layout.world_size}"
        elif estimate.job.seq_len != request.seq_len:
            change = f"shorter sequences: --seq-len {estimate.job.seq_len}"
        job = estimate.job
        changes_results = changes_results or _has_lower_precision(
            request, job.optimizer, job.pure_bf16
        )
        found.append(_described(change, estimate, None, changes_results=changes_results))
    return found


def _has_lower_precision(request: PlanRequest, optimizer: Optimizer, pure: bool) -> bool:
    return any(
        (changed.optimizer, changed.pure_bf16) == (optimizer, pure)
        for changed in lower_precision(request)
    )


def _first(request: PlanRequest, gpus: int) -> Estimate | None:
    """The fastest estimate of a request; None if nothing fits or the request is not possible."""
    if not can_hold_states(request, gpus):
        return None
    try:
        found, _ = search(request, gpus)
    except HfScaleError:
        return None
    return found[0] if found else None


def _with_shorter_sequences(request: PlanRequest) -> Estimate | None:
    seq_len = request.seq_len // 2
    while seq_len >= MIN_SEQ_LEN and (
        request.task not in ("grpo", "distillation") or seq_len > request.max_completion_length
    ):
        if (found := _first(replace(request, seq_len=seq_len), request.gpus)) is not None:
            return found
        seq_len //= 2
    return None


def _with_more_gpus(request: PlanRequest) -> Estimate | None:
    gpus = request.gpus
    for _ in range(MAX_GPU_DOUBLINGS):
        gpus *= 2
        if (found := _first(request, gpus)) is not None:
            return found
    return None
