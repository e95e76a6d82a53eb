"""What an estimate rests on, in words."""

from hfscale.planner.cost import MTBF_GPU_HOURS, RESTART_S, SAVE_BYTES_S_PER_NODE, SPOT_INTERRUPTIONS_PER_NODE_HOUR
from hfscale.planner.frameworks import stack
from hfscale.planner.job import Job
from hfscale.planner.network import DEFAULT_NETWORK_GB_S
from hfscale.planner.request import PlanRequest


def assumptions(request: PlanRequest, job: Job | None, tokens: float | None, headroom: float) -> list[str]:
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
        f"stack {request.stack}: {stack(request.stack).about}",
        f"nodes of {request.gpus_per_node}: {link} inside, {network:g} GB/s per GPU and direction between ({origin})",
        f"{request.precision} products, {request.optimizer} states, sequences packed to {request.seq_len} tokens",
        f"at most {headroom:.0%} of {gpu.memory_gib:g} GiB is planned for",
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
