"""Dollars and days of a run: interruptions, checkpoints, storage, providers.

A run that is interrupted once per MTBF on average and saves every tau seconds, each save stalling it for T_save, loses
T_save / tau to saving and (tau / 2 + T_restart) / MTBF to work done again and to starting; the loss is least at
tau = sqrt(2 T_save MTBF) (Young, 1974, "A first order approximation to the optimum checkpoint interval"). Goodput is
what is left, 1 / (1 + loss); it is a factor of its own beside the throughput, which says nothing of downtime.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfscale.facts.prices import Egress, Price
from hfscale.planner.job import Job
from hfscale.planner.memory import trained_parameters
from hfscale.planner.model_view import view_of

MTBF_GPU_HOURS = 50_000.0
"""GPU-hours between unexpected interruptions: 419 in 54 days on 16,384 H100s (Llama 3, arXiv 2407.21783, section
3.3.4)
make 50,700. Meta's research clusters had 8,100 at 1,024 GPUs (Kokolis et al., arXiv 2410.21680): expect less luck."""
SPOT_INTERRUPTIONS_PER_NODE_HOUR = 0.02
"""Preemptions of a spot node per hour. No provider publishes one for GPUs: AWS's Spot Instance Advisor only says `over
20% a month` (3e-4 per hour at least), and traces of GPU spot pools have several per hour and pool (Thorpe et al.,
Bamboo, NSDI 2023). This is one in two days; say what you see with --spot-interruptions."""
RESTART_S = 600.0
"""From an interruption to the next step: noticing, a new node, loading. Minutes; an assumption."""
SAVE_BYTES_S_PER_NODE = 2e9
"""Bytes per second that a node writes to shared storage, an assumption: half of a 32 Gbit/s share."""
STORAGE_USD_PER_GB_MONTH = 0.023
"""Object storage, standard class (AWS S3, us-east-1)."""
CHECKPOINTS_KEPT = 2
"""Checkpoints that lie on storage at a time."""
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """What interruptions make of a run."""

    mtbf_hours: float
    """Hours between interruptions of the whole run."""
    save_s: float
    """Seconds that a checkpoint stalls the run."""
    cadence_s: float
    """Seconds between checkpoints that lose least."""
    lost_fraction: float
    """Time lost over time used."""

    @property
    def goodput(self) -> float:
        """Part of the time that makes progress."""
        return 1 / (1 + self.lost_fraction)


def checkpoint_bytes(job: Job) -> float:
    """A checkpoint with what a resume needs: trained parameters in fp32 with their two moments, frozen ones in 2 bytes
    not at all, since they are the base model's."""
    return 12.0 * trained_parameters(view_of(job.shape), job)


def reliability(job: Job, *, spot: bool, interruptions_per_node_hour: float | None = None) -> Reliability:
    """Interruptions, the cadence that fits them, and what they cost."""
    gpus = job.layout.world_size
    nodes = math.ceil(gpus / job.gpus_per_node)
    per_hour = gpus / MTBF_GPU_HOURS
    if spot:
        rate = SPOT_INTERRUPTIONS_PER_NODE_HOUR if interruptions_per_node_hour is None else interruptions_per_node_hour
        per_hour += nodes * rate
    mtbf_s = 3600 / per_hour
    save_s = checkpoint_bytes(job) / (SAVE_BYTES_S_PER_NODE * nodes)
    cadence_s = math.sqrt(2 * save_s * mtbf_s)
    lost = save_s / cadence_s + (cadence_s / 2 + RESTART_S) / mtbf_s
    return Reliability(mtbf_hours=mtbf_s / 3600, save_s=save_s, cadence_s=cadence_s, lost_fraction=lost)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A run at one provider."""

    provider: str
    """Who."""
    gpu: str
    """The accelerator."""
    kind: str
    """`on-demand` or `spot`."""
    usd_per_gpu_hour: float
    """The rate."""
    hours: float
    """From start to end, interruptions counted."""
    gpu_hours: float
    """Hours of all GPUs, interruptions counted."""
    usd: float
    """Dollars, storage of checkpoints counted, and the way out of the last one where its price is known."""
    usd_per_million_tokens: float
    """Dollars per million trained tokens."""
    goodput: float
    """Part of the time that makes progress."""
    egress_usd: float | None = None
    """Of these, for the last checkpoint on its way out to the internet; None where the rate is not known."""
    region: str | None = None
    """Where."""
    source: str | None = None
    """Where the rate was read; None for one given by the user."""
    date: str | None = None
    """When."""


def cost(
    job: Job,
    *,
    tokens: float,
    tokens_per_s: float,
    usd_per_gpu_hour: float,
    provider: str,
    spot: bool = False,
    interruptions_per_node_hour: float | None = None,
    row: Price | None = None,
    egress: Egress | None = None,
) -> Cost:
    """What training on `tokens` tokens costs at a rate."""
    trust = reliability(job, spot=spot, interruptions_per_node_hour=interruptions_per_node_hour)
    hours = tokens / tokens_per_s / 3600 / trust.goodput
    gpu_hours = hours * job.layout.world_size
    stored = CHECKPOINTS_KEPT * checkpoint_bytes(job) / 1e9 * STORAGE_USD_PER_GB_MONTH * hours / HOURS_PER_MONTH
    taken_out = None if egress is None else checkpoint_bytes(job) / 1e9 * egress.usd_per_gb
    usd = gpu_hours * usd_per_gpu_hour + stored + (taken_out or 0.0)
    return Cost(
        provider=provider,
        gpu=job.gpu.name,
        kind="spot" if spot else "on-demand",
        usd_per_gpu_hour=usd_per_gpu_hour,
        hours=hours,
        gpu_hours=gpu_hours,
        usd=usd,
        usd_per_million_tokens=usd / tokens * 1e6,
        goodput=trust.goodput,
        egress_usd=taken_out,
        region=row.region if row else None,
        source=row.source if row else None,
        date=row.date.isoformat() if row else None,
    )


def compare(
    job: Job,
    prices: Iterable[Price],
    *,
    tokens: float,
    tokens_per_s: float,
    interruptions_per_node_hour: float | None = None,
    egress: Mapping[str, Egress] | None = None,
) -> list[Cost]:
    """The run at every provider, on demand and spot, cheapest first; `egress` is `all_egress`'s."""
    costs = []
    for row in prices:
        for rate, spot in ((row.on_demand_usd, False), (row.spot_usd, True)):
            if rate is not None:
                costs.append(
                    cost(
                        job,
                        tokens=tokens,
                        tokens_per_s=tokens_per_s,
                        usd_per_gpu_hour=rate,
                        provider=row.provider,
                        spot=spot,
                        interruptions_per_node_hour=interruptions_per_node_hour,
                        row=row,
                        egress=(egress or {}).get(row.provider.casefold()),
                    )
                )
    return sorted(costs, key=lambda item: item.usd)
