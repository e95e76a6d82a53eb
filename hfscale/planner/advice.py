"""What an engineer should know about the choice at hand: rules of thumb, computed for this case, each with its
source."""

from dataclasses import dataclass, replace

from hfscale.facts.hardware import peak_tflops
from hfscale.planner.cost import MTBF_GPU_HOURS, RESTART_S, SAVE_BYTES_S_PER_NODE, SPOT_INTERRUPTIONS_PER_NODE_HOUR
from hfscale.planner.estimate import Estimate, estimate_job
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import Job
from hfscale.planner.kernels import DEFAULT_ACHIEVED
from hfscale.planner.memory import host_gib
from hfscale.planner.network import DEFAULT_NETWORK_GB_S
from hfscale.planner.search import HEADROOM, PlanRequest

SMALL, LARGE = 7e9, 70e9
"""Parameters between the tiers: data parallel, sharded, tensor x pipeline x data parallel."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One sentence or two, and where the rule comes from."""

    text: str
    """What to know or do."""
    source: str
    """Where the rule comes from."""


def advice(best: Estimate, choices: list[Estimate]) -> list[Advice]:
    """Advice for the first choice, most useful first."""
    found = [_offload(best), _tier(best), _largest_loss(best), _data_parallel_link(best), _tensor_parallel(best)]
    found += [_loss(best), _zero_limits(best), _simpler(best, choices)]
    return [item for item in found if item is not None]


def _offload(best: Estimate) -> Advice | None:
    job = best.job
    if job.offload == "none":
        return None
    gigabytes = host_gib(job) * min(job.gpus_per_node, job.layout.world_size)
    return Advice(
        text=f"Nothing fits without the CPU's memory: every machine needs {gigabytes:,.0f} GiB of it for states. "
        "More GPUs, or LoRA, would be several times faster.",
        source="16 bytes per parameter, DeepSpeed ZeRO-Offload (Ren et al., arXiv 2101.06840)",
    )


def _tier(best: Estimate) -> Advice | None:
    parameters = best.job.shape.total_parameters
    if parameters < SMALL:
        usual, uses = "plain data parallelism (ZeRO-1 or FSDP2 when memory is short)", best.job.zero < 3
    elif parameters <= LARGE:
        usual, uses = "FSDP2 or ZeRO-3, HSDP across nodes", best.job.zero == 3
    else:
        usual, uses = (
            "tensor parallelism inside the node x pipeline across nodes x data parallelism",
            best.job.layout.pp > 1,
        )
    if uses:
        return None
    return Advice(
        text=f"A model of {parameters / 1e9:.1f}B usually takes {usual}; on {best.job.layout.world_size} "
        f"{best.job.gpu.name} the first choice here is estimated faster.",
        source="hfscale's tiers: under 7B, 7B to 70B, above",
    )


def _largest_loss(best: Estimate) -> Advice | None:
    time = best.time
    lost = {
        "exposed communication": time.communication,
        "the pipeline bubble": time.bubble,
        "the optimizer": time.optimizer,
    }
    name, seconds = max(lost.items(), key=lambda item: item[1])
    share = seconds / time.total
    if share < 0.1:
        return None
    mend = {
        "exposed communication": "more tokens per GPU and step, or a layout that sends less across nodes",
        "the pipeline bubble": "a larger global batch, fewer stages or more virtual stages",
        "the optimizer": "a larger global batch, or sharded optimizer states",
    }[name]
    return Advice(text=f"{name.capitalize()} takes {share:.0%} of the step: {mend}.", source="this estimate")


def _data_parallel_link(best: Estimate) -> Advice | None:
    """DDP's gradients of 2 bytes hide under the backward pass when the network gives F / T, with F the rate achieved
    and T the tokens per GPU and step: a ring moves 4 bytes per parameter, backward takes 4 FLOPs per parameter and
    token."""
    job = best.job
    if job.data_parallel == 1 or job.layout.world_size <= job.gpus_per_node:
        return None
    peak = peak_tflops(job.gpu, "bf16") or job.gpu.fp16_tflops or 0.0
    achieved = (best.mfu or 0.0) * peak
    tokens = job.global_batch * job.seq_len / job.layout.world_size
    if not achieved:
        return None
    gigabits = achieved * 1e12 / tokens * 8 / 1e9
    has = (job.network_gb_s or job.gpu.network_gb_s or 12.5) * 8
    verdict = "enough" if has >= gigabits else "too little: raise the tokens per GPU and step"
    return Advice(
        text=f"Data-parallel gradients hide under the backward pass from {gigabits:.0f} Gbit/s per GPU on (at "
        f"{tokens:,.0f} tokens per GPU and step); the network taken here has {has:.0f}: {verdict}.",
        source="bandwidth >= FLOP/s / tokens per GPU; ring all-reduce",
    )


def _tensor_parallel(best: Estimate) -> Advice | None:
    """TP traffic over compute is about 16 (t-1) F / (72 h BW) (Narayanan et al., 2104.04473, section 3.2)."""
    job = best.job
    if job.layout.tp == 1:
        return None
    peak = (peak_tflops(job.gpu, "bf16") or 0.0) * DEFAULT_ACHIEVED * 1e12
    link = job.gpu.link_gb_s
    if link is None:
        return Advice(
            text=f"{job.gpu.name} has no NVLink: tensor parallelism over PCIe rarely pays.",
            source="NVIDIA datasheet; TP sends four activations per layer and pass",
        )
    ratio = 16 * (job.layout.tp - 1) * peak / (72 * job.shape.hidden * link * 1e9)
    return Advice(
        text=f"Keep the {job.layout.tp} tensor-parallel ranks inside a node: over NVLink their traffic is "
        f"{ratio:.0%} of the computation, over the network it would be "
        f"{ratio * link / (job.gpu.network_gb_s or 12.5):.0%}.",
        source="Narayanan et al., arXiv 2104.04473, section 3.2",
    )


def _loss(best: Estimate) -> Advice | None:
    """Whether a fused cross-entropy would free much."""
    if best.job.fused_loss or best.memory.loss < 0.1 * best.job.gpu.memory_gib:
        return None
    fused = estimate_job(replace(best.job, fused_loss=True))
    return Advice(
        text=f"The logits take {best.memory.loss:.1f} GiB at the loss; use_liger_kernel would bring the peak from "
        f"{best.memory.total:.0f} to {fused.memory.total:.0f} GiB.",
        source="Liger Kernel, arXiv 2410.10989",
    )


def _zero_limits(best: Estimate) -> Advice | None:
    if best.job.zero == 0 or best.job.method != "full":
        return None
    ranks = best.job.layout.dp_shard if best.job.zero == 3 else best.job.data_parallel
    if ranks > 16 or ranks == 1:
        return None
    saves = {1: 16 / (4 + 12 / ranks), 2: 16 / (2 + 14 / ranks), 3: float(ranks)}[best.job.zero]
    return Advice(
        text=f"On {ranks} ranks this sharding saves {saves:.1f}x of the model states, not the limit's 4x, 8x or Nx.",
        source="Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3",
    )


def simplicity(estimate: Estimate) -> tuple[int, int]:
    """What a layout asks of its user, least first: mesh axes in use, then DDP before FSDP2 before DeepSpeed."""
    job = estimate.job
    layout = job.layout
    sizes = (layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.pp)
    software = 3 if job.offload != "none" else (0, 2, 2, 1)[job.zero]
    return sum(size > 1 for size in sizes), software


def _simpler(best: Estimate, choices: list[Estimate]) -> Advice | None:
    """A layout with fewer axes that is nearly as fast."""
    simpler = [other for other in choices if simplicity(other)[0] < simplicity(best)[0]]
    if not simpler:
        return None
    other = min(simpler, key=lambda estimate: estimate.time.total)
    slower = other.time.total / best.time.total - 1
    if slower > 0.1:
        return None
    return Advice(
        text=f"{other.job.layout} with ZeRO stage {other.job.zero} is simpler and only {slower:.0%} slower, about "
        "what the estimate can tell.",
        source="benchmarks/results/planner_fit.json",
    )


def assumptions(request: PlanRequest, job: Job | None, tokens: float | None) -> list[str]:
    """One sentence each."""
    gpu = request.gpu
    known = (
        (request.network_gb_s, "given"),
        (gpu.achieved_network_gb_s, "measured"),
        (gpu.network_gb_s, "the vendor's reference node"),
        (DEFAULT_NETWORK_GB_S, "assumed"),
    )
    network, origin = next((rate, told) for rate, told in known if rate)
    link = f"{gpu.link_gb_s:g} GB/s NVLink or xGMI" if gpu.link_gb_s else "PCIe only"
    if gpu.achieved_link_gb_s:
        link = f"{gpu.achieved_link_gb_s:g} GB/s measured"
    found = [
        f"stack {request.framework}: {find_framework(request.framework).about}",
        f"nodes of {request.gpus_per_node}: {link} inside, {network:g} GB/s per GPU and direction between ({origin})",
        f"{request.precision} products, {request.optimizer} states, sequences packed to {request.seq_len} tokens",
        f"at most {HEADROOM:.0%} of {gpu.memory_gib:g} GiB is planned for",
    ]
    if job is not None:
        tokens_per_step = job.global_batch * job.seq_len
        origin = "given" if request.global_batch else "assumed"
        found.append(f"global batch {job.global_batch} sequences, {tokens_per_step:,} tokens per step ({origin})")
    if job is not None and job.overlapped_experts:
        found.append(
            "tokens go to their experts and back while another micro-batch is computed, once to each node "
            "(Megatron-Core: --overlap-moe-expert-parallel-comm, --moe-token-dispatcher-type flex)"
        )
    if job is not None and job.layout.pp > 1 and job.shape.layers % job.layout.pp:
        found.append(
            f"{job.shape.layers} layers on {job.layout.pp} pipeline ranks are not even: {max(job.layer_split)} on the "
            "fullest, which sets the pace"
        )
    if tokens is not None:
        found += [
            f"goodput: one interruption per {MTBF_GPU_HOURS:,.0f} GPU-hours, of spot nodes "
            f"{SPOT_INTERRUPTIONS_PER_NODE_HOUR:g} per node-hour besides, {RESTART_S / 60:.0f} minutes to restart, "
            f"saves at {SAVE_BYTES_S_PER_NODE / 1e9:g} GB/s per node at Young's cadence",
            "dollars: list prices as of their date, storage of two checkpoints, and the last one's way out to the "
            "internet where the provider's rate is known (egress_usd of --json); no tax or discount",
        ]
    return found
