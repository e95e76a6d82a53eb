"""Advice on a plan's first choice, each piece computed for the case and with its source, and the assumptions of an
estimate."""

from dataclasses import dataclass

from hfscale.core.spelling import spelled
from hfscale.facts.hardware import peak_tflops
from hfscale.facts.support import LISTS
from hfscale.planner.cost import (
    MTBF_GPU_HOURS,
    RESTART_S,
    SAVE_BYTES_S_PER_NODE,
    SPOT_INTERRUPTIONS_PER_NODE_HOUR,
)
from hfscale.planner.estimate import Estimate
from hfscale.planner.experts import gathered_share, imbalance_of, kept_share
from hfscale.planner.frameworks import find_framework, shared_constants
from hfscale.planner.frozen import mean_bytes
from hfscale.planner.job import Job
from hfscale.planner.kernels import DEFAULT_ACHIEVED
from hfscale.planner.memory import GIB
from hfscale.planner.network import datasheet_network_gb_s
from hfscale.planner.request import PlanRequest
from hfscale.planner.search import USABLE_MEMORY_FRACTION
from hfscale.planner.tasks import BATCH_UNITS, generated_at_once, kv_cache_bytes
from hfscale.planner.teacher import teacher_width

LARGE_PART = 0.1
"""Part of a step from which a loss of time is named."""
SMALL = 7e9
LARGE = 70e9
"""Numbers of parameters that separate the tiers: data parallel, sharded, tensor x pipeline x data parallel."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Holds one or two sentences of advice, and where the rule comes from."""

    text: str
    """What to know or do."""
    source: str
    """Where the rule comes from."""


def advice(best: Estimate, choices: list[Estimate]) -> list[Advice]:
    """Give advice on the first choice, most useful first.

    Args:
        best (`Estimate`): the first choice.
        choices (`list[Estimate]`): all choices.
    """
    found = [
        _offload(best),
        _tier(best),
        _largest_loss(best),
        _data_parallel_link(best),
        _tensor_parallel(best),
    ]
    found += [_zero_limits(best), _simpler(best, choices)]
    return [item for item in found if item is not None]


def _offload(best: Estimate) -> Advice | None:
    """The CPU memory that offload needs."""
    if best.job.offload == "none":
        return None
    saving = best.saving_host_gib_per_node
    copied = f"{saving:,.0f} with the copy of a background save"
    if saving > best.host_gib_assumed:
        copied += ", without which training waits for each save"
    return Advice(
        text=f"Offload and loading need {best.host_gib_per_node:,.0f} GiB of CPU memory in every machine, {copied}; "
        f"{best.host_gib_assumed:,.0f} are assumed.",
        source="18 to 22 bytes per parameter, DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py",
    )


def _tier(best: Estimate) -> Advice | None:
    """Whether the first choice differs from what is usual for a model of this size."""
    parameters = best.job.shape.total_parameters
    if parameters < SMALL:
        usual = "plain data parallelism (ZeRO-1 or FSDP2 when memory is short)"
        is_usual = best.job.zero < 3
    elif parameters <= LARGE:
        usual = "FSDP2 or ZeRO-3, HSDP across nodes"
        is_usual = best.job.zero == 3
    else:
        usual = "tensor parallelism inside the node x pipeline across nodes x data parallelism"
        is_usual = best.job.layout.pp > 1
    if is_usual:
        return None
    return Advice(
        text=f"A model of {parameters / 1e9:.1f}B parameters is usually trained with {usual}; on "
        f"{best.job.layout.world_size} {best.job.gpu.name} the first choice here is estimated to be faster.",
        source="hfscale's tiers: under 7B, 7B to 70B, above",
    )


def _largest_loss(best: Estimate) -> Advice | None:
    """The part of the step, other than computation, that takes most time."""
    time = best.time
    lost = {
        "exposed communication": time.communication,
        "the pipeline bubble": time.bubble,
        "the optimizer": time.optimizer,
    }
    name, seconds = max(lost.items(), key=lambda item: item[1])
    share = seconds / time.total
    if share < LARGE_PART:
        return None
    fix = {
        "exposed communication": "use more tokens per GPU and micro-batch, or a layout that sends less across nodes",
        "the pipeline bubble": "use a larger global batch, fewer stages or more virtual stages",
        "the optimizer": "use a larger global batch, or shard optimizer states",
    }[name]
    return Advice(
        text=f"{name.capitalize()} takes {share:.0%} of the step: {fix}.", source="this estimate"
    )


def _data_parallel_link(best: Estimate) -> Advice | None:
    """Whether the network is fast enough to hide the exchange of data-parallel ranks.

    It is hidden by the computation of a step if the bandwidth is at least bytes / seconds. DDP and sharded optimizer
    states exchange twice the bytes of the gradients once per step, in a ring. Sharded parameters are gathered for both
    passes of each micro-batch, and their gradients are reduced.
    """
    job = best.job
    if (
        job.data_parallel == 1
        or job.layout.world_size <= job.gpus_per_node
        or not best.time.compute
    ):
        return None
    tokens = job.tokens_per_step / job.layout.world_size
    parameters = job.shape.total_parameters / (job.layout.tp * job.layout.pp)
    trained = 0.0 if job.method != "full" else parameters
    gradient = find_framework(job.stack).gradient_bytes
    # Sharded parameters are exchanged per micro-batch, everything else once per step
    if job.zero == 3:
        gathered = (2 if job.reshard else 1) * mean_bytes(job) * parameters
        times = job.micro_batches
        if job.runs_parallel_trainer:
            times = 1
        moved = times * (gathered + gradient * trained)
        what = f"the weights and gradients that ranks exchange {times} times a step"
    else:
        moved = 2 * gradient * trained
        what = "the gradients that ranks exchange once a step"
    if not moved:
        return None
    gigabits = moved / best.time.compute * 8 / 1e9
    available = (job.network_gb_s or datasheet_network_gb_s(job.gpu, job.gpus_per_node)) * 8
    is_exposed = best.time.communication >= LARGE_PART * best.time.total
    if available >= gigabits and is_exposed:
        return None  # what is exposed is another exchange, or one that waits for nothing but itself
    verdict = "enough" if available >= gigabits else "too little: raise the tokens per GPU and step"
    if available < gigabits and job.zero == 3 and job.micro_batches > 1:
        verdict = "too little: raise the tokens per micro-batch, or use fewer of them"
    return Advice(
        text=f"The computation hides {what} if the network has at least {gigabits:.0f} Gbit/s per GPU (at "
        f"{tokens:,.0f} tokens per GPU and step); it is assumed to have {available:.0f}, which is {verdict}.",
        source="bandwidth >= bytes / seconds of computation; ring collectives",
    )


def _tensor_parallel(best: Estimate) -> Advice | None:
    """The cost of tensor parallelism inside a node and across nodes.

    Its communication relative to computation is about 16 (t-1) F / (72 h BW) (Narayanan et al., arXiv 2104.04473,
    section 3.2).
    """
    job = best.job
    if job.layout.tp == 1:
        return None
    peak = (peak_tflops(job.gpu, "bf16") or 0.0) * DEFAULT_ACHIEVED * 1e12
    link = job.gpu.link_gb_s
    if link is None:
        return Advice(
            text=f"{job.gpu.name} has no NVLink: tensor parallelism over PCIe rarely pays.",
            source="NVIDIA datasheet; tensor parallelism sends four activations per layer and pass",
        )
    ratio = 16 * (job.layout.tp - 1) * peak / (72 * job.shape.hidden * link * 1e9)
    return Advice(
        text=f"Keep the {job.layout.tp} tensor-parallel ranks inside a node: over NVLink their communication takes "
        f"{ratio:.0%} of the time of the computation, over the network it would take "
        f"{ratio * link / datasheet_network_gb_s(job.gpu, job.gpus_per_node):.0%}.",
        source="Narayanan et al., arXiv 2104.04473, section 3.2",
    )


def _zero_limits(best: Estimate) -> Advice | None:
    """What ZeRO saves on this number of ranks."""
    if best.job.zero == 0 or best.job.method != "full":
        return None
    ranks = best.job.layout.dp_shard if best.job.zero == 3 else best.job.data_parallel
    if ranks > 16 or ranks == 1:
        return None
    # The paper's gradients are in 16 bits; DeepSpeed accumulates them in fp32, as the shipped configs ask.
    saves = {1: 16 / (6 + 12 / ranks), 2: 16 / (2 + 16 / ranks), 3: float(ranks)}[best.job.zero]
    return Advice(
        text=f"On {ranks} ranks this sharding reduces the model states by {saves:.1f}x; the factors 4, 8 and N are "
        "limits for many ranks, with gradients in 16 bits.",
        source="Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3",
    )


def simplicity(estimate: Estimate) -> tuple[int, ...]:
    """Compute a sort key of how simple a layout is to use; the simplest layout has the smallest key.

    Returns:
        `tuple[int, ...]`: the number of mesh axes in use, where data parallelism counts only if it has two, and
            expert parallelism in Hugging Face's stack only, without a pipeline or over replicas; a rank of the
            software: 0 for DDP, 1 for FSDP2, 2 for DeepSpeed, 3 for DeepSpeed with offload; the number of pipeline
            stages; and whether the loss is fused, which needs Liger Kernel.
    """
    job = estimate.job
    layout = job.layout
    spans_replicas = job.expert_parallel > layout.dp_shard * layout.cp * layout.tp
    axes = sum(size > 1 for size in (layout.cp, layout.tp, layout.pp))
    axes += job.spreads_experts and (layout.pp == 1 or spans_replicas)
    axes += min(layout.dp_replicate, layout.dp_shard) > 1
    software = 3 if job.offload != "none" else (0, 2, 2, 1)[job.zero]
    return axes, software, layout.pp * job.virtual_stages, int(job.liger)


def _simpler(best: Estimate, choices: list[Estimate]) -> Advice | None:
    """Whether a layout with fewer axes is nearly as fast."""
    simpler = [other for other in choices if simplicity(other)[0] < simplicity(best)[0]]
    if not simpler:
        return None
    other = min(simpler, key=lambda estimate: estimate.time.total)
    slower = other.time.total / best.time.total - 1
    if slower > 0.1:
        return None
    return Advice(
        text=f"{other.job.layout.summary} with ZeRO stage {other.job.zero} is simpler and only {slower:.0%} slower, "
        "which is about the error of the estimate.",
        source="benchmarks/results/planner_fit.json",
    )


def _of_the_choice(job: Job, request: PlanRequest) -> list[str]:
    """What the numbers of the first choice are based on."""
    origin = "given" if request.global_batch else "assumed"
    unit = BATCH_UNITS.get(request.task, "sequences")
    found = [
        f"global batch {job.global_batch} {unit}, {job.tokens_per_step:,} tokens per step ({origin})",
        *_of_the_task(job),
    ]
    # What was assumed without being asked for is named with the flag that plans without it.
    if job.liger and job.stack == "hf" and not job.chunked_loss:
        found.append(
            "the fused loss needs Liger Kernel (pip install liger-kernel); --no-liger plans without it"
        )
    if job.liger and job.chunked_loss:
        found.append(
            "the loss is computed in chunks, as the recipes do on NVIDIA GPUs; --no-liger plans without it"
        )
    if job.compile and job.stack == "hf" and request.compile is None:
        found.append(
            "layers are compiled, as the recipes do on NVIDIA GPUs; where FlashAttention cuts between packed "
            "documents they are not: plan that with --no-compile"
        )
    bits = []
    if job.optimizer != request.optimizer:
        bits.append(f"optimizer {job.optimizer}")
    if job.pure_bf16 != request.pure_bf16:
        bits.append("parameters and states in bf16")
    if bits:
        found.append(
            f"nothing fits otherwise: {', '.join(bits)}, which change the training's results"
        )
    found += _of_experts(job)
    if job.layout.pp > 1 and job.shape.layers % job.layout.pp:
        found.append(
            f"{job.shape.layers} layers do not divide evenly by {job.layout.pp} pipeline ranks: the fullest has "
            f"{max(job.layer_split)} and sets the pace"
        )
    return found


def assumptions(request: PlanRequest, job: Job | None, tokens: float | None) -> list[str]:
    """List what the numbers of a plan are based on, one line each.

    Args:
        request (`PlanRequest`): what was planned for.
        job (`Job`, *optional*): the first choice; None if nothing fits.
        tokens (`float`, *optional*): tokens to train on; None if no costs were computed.
    """
    gpu = request.gpu
    known = (
        (request.network_gb_s, "given"),
        (gpu.achieved_network_gb_s, "measured"),
        (gpu.network_gb_s, "the vendor's reference node"),
        (
            datasheet_network_gb_s(gpu, request.gpus_per_node),
            "assumed: 100 Gbit/s per node; give --network-gb-s",
        ),
    )
    network, origin = next((rate, source) for rate, source in known if rate)
    link = "PCIe only"
    if gpu.achieved_link_gb_s:
        link = f"{gpu.achieved_link_gb_s:g} GB/s measured"
    elif gpu.link_gb_s:
        link = f"{gpu.link_gb_s:g} GB/s of NVLink or xGMI"
    found = [
        f"framework {request.stack}: {find_framework(request.stack).about}",
        f"nodes of {request.gpus_per_node} GPUs: {link} inside a node, {network:g} GB/s per GPU and direction between "
        f"nodes, {network * 8 * request.gpus_per_node:,.0f} Gbit/s per node ({origin})",
        f"{request.precision} matrix products, {request.optimizer} states, {_rows(request)}",
        f"a plan uses at most {USABLE_MEMORY_FRACTION:.0%} of {gpu.memory_gib:g} GiB",
    ]
    if job is not None:
        found += _of_the_choice(job, request)
    if tokens is not None:
        found += [
            f"goodput: one interruption per {MTBF_GPU_HOURS:,.0f} GPU-hours, for spot nodes also "
            f"{SPOT_INTERRUPTIONS_PER_NODE_HOUR:g} per node-hour, {RESTART_S / 60:.0f} minutes to restart, "
            f"checkpoints at Young's interval, saved at {SAVE_BYTES_S_PER_NODE / 1e9:g} GB/s per node",
            "costs: list prices as of their date, storage of two checkpoints, and egress of the last one to the "
            "internet where the provider's price is known (egress_usd in --json); no taxes or discounts",
        ]
    return found


def _of_experts(job: Job) -> list[str]:
    """What the numbers of a mixture of experts rest on."""
    if job.shape.moe is None:
        return []
    found = []
    ranks = job.layout.dp_shard * job.layout.cp
    if job.overlapped_experts:
        found.append(
            "tokens are sent to their experts and back while another micro-batch is computed, once to each node "
            "(Megatron-Core: --overlap-moe-expert-parallel-comm, --moe-token-dispatcher-type flex)"
        )
    if job.expert_parallel > 1:
        found.append(
            f"the fullest of the {job.expert_parallel} ranks that share experts gets "
            f"{imbalance_of(job, shared_constants()):g} times the average tokens ({spelled('expert_imbalance')}; "
            "moe/max_load of a run is that of its fullest expert)"
        )
    if job.is_native:
        found.append(
            "expert parallelism: transformers shards the model itself, DistributedConfig with "
            f"fsdp_size={job.layout.dp_shard}, dp_replicate_size={job.layout.dp_replicate}, "
            f"ep_size={job.expert_parallel} and fsdp_mixed_precision={job.precision != 'fp32'}"
        )
    if job.zero == 3 and gathered_share(job) > 1.01:
        here = job.shape.moe.experts // job.expert_parallel
        found.append(
            f"FSDP2 shards the {here} experts of a layer by expert: a rank keeps up to "
            f"{round(here * kept_share(job, ranks))} of them, and gathers them padded to "
            f"{gathered_share(job):.2g} times their size"
        )
    return found


def _rows(request: PlanRequest) -> str:
    """What a batch consists of."""
    if request.task in ("grpo", "distillation"):
        return f"prompts and completions of up to {request.seq_len} tokens together"
    if request.task == "vision":
        return f"sequences of up to {request.seq_len} tokens, those of images included"
    return f"{'pairs of sequences of' if request.task == 'dpo' else 'sequences packed to'} {request.seq_len} tokens"


def _of_the_task(job: Job) -> list[str]:
    """What the numbers of a task rest on."""
    if job.task == "text":
        return []
    reference = (
        "a frozen copy of the model"
        if job.has_reference_model
        else "the model without its adapters"
    )
    if job.task == "sft":
        return [
            "sft: a training step with the loss on part of the tokens, with the memory and time of plain training, "
            "except that TRL computes the loss in tiles, without all logits",
            *_of_packing(job.shape.model_type),
        ]
    if job.task == "dpo":
        passes = (
            f"computed in each step by {reference}"
            if job.has_reference_pass
            else "precomputed (not in the time)"
        )
        return [
            f"dpo: the sequences of a pair pass the model together; log-probabilities of the reference: {passes}"
        ]
    if job.task == "vision":
        return [_of_the_images(job)]
    cache = kv_cache_bytes(job, job.seq_len) / GIB
    generated = (
        f"transformers generates {generated_at_once(job)} at a time on each GPU, with {cache:.1f} GiB of keys and "
        "values"
    )
    if job.task == "distillation":
        return [
            f"distillation: completions of {job.max_completion_length} tokens; {generated} (vLLM is not estimated)",
            _of_the_teacher(job),
        ]
    penalty = f"the reference is {reference}" if job.has_reference_pass else "no reference model"
    return [
        f"grpo: {job.num_generations} completions per prompt, all of {job.max_completion_length} tokens; {generated} "
        "(vLLM and rewards are not estimated)",
        f"grpo: beta {job.beta:g}, {penalty}; the old policy's log-probabilities are those of the training pass",
    ]


def _of_packing(family: str) -> list[str]:
    """What recipes/sft needs to pack conversations, or why it does not."""
    if family in LISTS["documents_mixed"]:
        return [
            f"sft: conversations are not packed, since those of {family} would see each other; padding is not counted"
        ]
    if family in LISTS["documents_need_kernel"]:
        return [
            f"sft: packed conversations of {family} need kernels of other packages: causal-conv1d, and those that "
            "transformers names in the first step, such as flash-linear-attention; without them, give the recipe "
            "--packing false"
        ]
    return []


def _of_the_images(job: Job) -> str:
    """What the numbers of a training with images rest on."""
    tower = job.tower
    assert tower is not None, "checked by `check_task`"
    parts = {"tower": job.train_vision_tower, "projector": job.trains_projector}
    states = ", ".join(
        f"{name} {'trained' if is_trained else 'frozen'}" for name, is_trained in parts.items()
    )
    return (
        f"vision: {job.images} image(s) of {tower.side} x {tower.side} pixels per sequence, each {tower.positions:,} "
        f"positions of the tower and {tower.tokens} tokens; {states} ({tower.tower_parameters / 1e6:,.0f}M and "
        f"{tower.projector_parameters / 1e6:,.1f}M parameters)"
    )


def _of_the_teacher(job: Job) -> str:
    """What the numbers of a teacher rest on."""
    teacher = job.teacher_shape
    assert teacher is not None, "checked by `check_task`"
    kept = "shared by the GPUs" if job.shares_teacher else "complete on each GPU"
    return (
        f"distillation: a teacher of {teacher.total_parameters / 1e9:.2f}B parameters, {teacher_width(job):g} bytes "
        f"each, {kept}; the loss compares whole vocabularies in tiles"
    )
