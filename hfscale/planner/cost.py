"""Duration and cost of a run: interruptions, checkpoints, storage, providers.

A run that is interrupted once per MTBF on average and saves every tau seconds, where a save stalls it for T_save,
loses T_save / tau to saving, and (tau / 2 + T_restart) / MTBF to repeated work and restarts. The loss is least at
tau = sqrt(2 T_save MTBF) (Young, 1974, "A first order approximation to the optimum checkpoint interval"). Goodput is
the remaining fraction, 1 / (1 + loss); throughput does not include it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hfscale.facts.prices import Egress, Price
from hfscale.planner.job import Job
from hfscale.planner.memory import trained_parameters

MTBF_GPU_HOURS = 50_000.0
"""GPU-hours between unexpected interruptions: 419 interruptions in 54 days on 16,384 H100s (Llama 3, arXiv 2407.21783,
section 3.3.4) are one per 50,700. Meta's research clusters had one per 8,100 at 1,024 GPUs (Kokolis et al., arXiv
2410.21680), so expect more."""
SPOT_INTERRUPTIONS_PER_NODE_HOUR = 0.02
"""Preemptions of a spot node per hour. No provider publishes this rate for GPUs: AWS's Spot Instance Advisor gives
only `over 20% a month` (at least 3e-4 per hour), and traces of GPU spot pools have several per hour and pool (Thorpe
et al., Bamboo, NSDI 2023). The value is one in two days; set what you observe with --spot-interruptions."""
RESTART_S = 600.0
"""Seconds from an interruption to the next step: detection, a new node, loading. An assumption."""
SAVE_BYTES_S_PER_NODE = 2e9
"""Bytes per second that a node writes to shared storage, an assumption: half of a 32 Gbit/s share."""
STORAGE_USD_PER_GB_MONTH = 0.023
"""Price of object storage, standard class (AWS S3, us-east-1)."""
CHECKPOINTS_KEPT = 2
"""Number of checkpoints that are stored at a time."""
HOURS_PER_MONTH = 730.0
"""Hours of an average month."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Describes the interruptions of a run, and the time that they and checkpoints take."""

    mtbf_hours: float
    """Hours between interruptions of the whole run."""
    save_s: float
    """Seconds that a checkpoint stalls the run."""
    cadence_s: float
    """Seconds between checkpoints that minimise the loss."""
    lost_fraction: float
    """Lost time relative to time that makes progress."""

    @property
    def goodput(self) -> float:
        """Fraction of the time that makes progress."""
        return 1 / (1 + self.lost_fraction)


def checkpoint_bytes(job: Job) -> float:
    """Compute the bytes of a checkpoint: trained parameters in fp32 with their two moments.

    Frozen parameters are not in it, because they are those of the base model.
    """
    return 12.0 * trained_parameters(job)


def reliability(
    job: Job, *, spot: bool, interruptions_per_node_hour: float | None = None
) -> Reliability:
    """Compute the interruptions of a job, the optimal interval between checkpoints, and the time lost.

    Args:
        job (`Job`): the run.
        spot (`bool`): whether the nodes are spot instances, which are preempted too.
        interruptions_per_node_hour (`float`, *optional*): preemptions of a spot node per hour; by default
            `SPOT_INTERRUPTIONS_PER_NODE_HOUR`. It is not used without `spot`.
    """
    gpus = job.layout.world_size
    nodes = math.ceil(gpus / job.gpus_per_node)
    per_hour = gpus / MTBF_GPU_HOURS
    if spot:
        rate = (
            SPOT_INTERRUPTIONS_PER_NODE_HOUR
            if interruptions_per_node_hour is None
            else interruptions_per_node_hour
        )
        per_hour += nodes * rate
    mtbf_s = 3600 / per_hour
    save_s = checkpoint_bytes(job) / (SAVE_BYTES_S_PER_NODE * nodes)
    cadence_s = math.sqrt(2 * save_s * mtbf_s)
    lost = save_s / cadence_s + (cadence_s / 2 + RESTART_S) / mtbf_s
    return Reliability(
        mtbf_hours=mtbf_s / 3600, save_s=save_s, cadence_s=cadence_s, lost_fraction=lost
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Holds the cost of a run at one provider."""

    provider: str
    """The provider's name."""
    gpu: str
    """The accelerator."""
    kind: str
    """`on-demand` or `spot`."""
    usd_per_gpu_hour: float
    """Price per GPU and hour, USD."""
    hours: float
    """Duration of the run, interruptions included."""
    gpu_hours: float
    """Hours of all GPUs together, interruptions included."""
    usd: float
    """Total cost, USD, including storage of checkpoints and, where its price is known, egress of the last one."""
    usd_per_million_tokens: float
    """USD per million trained tokens."""
    goodput: float
    """Fraction of the time that makes progress."""
    egress_usd: float | None = None
    """Cost of copying the last checkpoint out to the internet, which `usd` includes; None where the rate is not
    known."""
    region: str | None = None
    """The region, if the price depends on it."""
    source: str | None = None
    """Where the price was read; None for a price given by the user."""
    date: str | None = None
    """When the price was read, as an ISO date."""


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
    """Compute the cost of training on `tokens` tokens at one price.

    Args:
        job (`Job`): the run.
        tokens (`float`): tokens to train on.
        tokens_per_s (`float`): tokens per second of all GPUs together, without interruptions.
        usd_per_gpu_hour (`float`): the price, USD per GPU and hour.
        provider (`str`): the provider's name.
        spot (`bool`): whether the nodes are spot instances.
        interruptions_per_node_hour (`float`, *optional*): preemptions of a spot node per hour; by default
            `SPOT_INTERRUPTIONS_PER_NODE_HOUR`.
        row (`Price`, *optional*): the row of the price list with the price, for region, source and date.
        egress (`Egress`, *optional*): the provider's egress price; without it the cost of egress is left out.
    """
    reliable = reliability(job, spot=spot, interruptions_per_node_hour=interruptions_per_node_hour)
    hours = tokens / tokens_per_s / 3600 / reliable.goodput
    gpu_hours = hours * job.layout.world_size
    storage_usd = (
        CHECKPOINTS_KEPT
        * checkpoint_bytes(job)
        / 1e9
        * STORAGE_USD_PER_GB_MONTH
        * hours
        / HOURS_PER_MONTH
    )
    egress_usd = None if egress is None else checkpoint_bytes(job) / 1e9 * egress.usd_per_gb
    usd = gpu_hours * usd_per_gpu_hour + storage_usd + (egress_usd or 0.0)
    return Cost(
        provider=provider,
        gpu=job.gpu.name,
        kind="spot" if spot else "on-demand",
        usd_per_gpu_hour=usd_per_gpu_hour,
        hours=hours,
        gpu_hours=gpu_hours,
        usd=usd,
        usd_per_million_tokens=usd / tokens * 1e6,
        goodput=reliable.goodput,
        egress_usd=egress_usd,
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
    only_spot: bool = False,
) -> list[Cost]:
    """Compute the cost of a run at every provider, on demand and spot, cheapest first.

    Args:
        job (`Job`): the run.
        prices (`Iterable[Price]`): prices of the job's GPU.
        tokens (`float`): tokens to train on.
        tokens_per_s (`float`): tokens per second of all GPUs together, without interruptions.
        interruptions_per_node_hour (`float`, *optional*): preemptions of a spot node per hour; by default
            `SPOT_INTERRUPTIONS_PER_NODE_HOUR`.
        egress (`Mapping`, *optional*): egress prices by provider in lower case (`all_egress`).
        only_spot (`bool`): whether to leave out on-demand prices.
    """
    costs = []
    for row in prices:
        for rate, spot in ((row.on_demand_usd, False), (row.spot_usd, True)):
            if rate is not None and (spot or not only_spot):
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
