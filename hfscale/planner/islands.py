"""Whether islands (DiLoCo) pay over a slow link: their throughput beside DDP and FSDP2 over the same link.

Every island is an ordinary launch, which the plan's first choice describes. After H steps each island uploads its
compressed pseudo-gradient to the rendezvous, which is at island 0, and downloads those of the others, in one round or
in one per fragment of the parameters. Training waits for what overlapped steps do not hide of a round. DDP and FSDP2
would run over all islands as one job of the same layout per island.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.facts.compression import Compression
from hfscale.planner.estimate import Estimate
from hfscale.planner.frameworks import find_framework
from hfscale.planner.job import Job
from hfscale.planner.memory import GIB, trained_parameters
from hfscale.planner.network import exposed_s
from hfscale.planner.options import IslandOptions

GAIN = 1.05
"""Least speed relative to the next best way at which islands are said to pay; less is within the errors."""
STALLED = 0.05
"""Share of the time in the exchange that the suggested number of steps keeps."""


@dataclass(frozen=True, kw_only=True)
class Islands:
    """Describes islands and the link between them."""

    count: int
    """Number of islands, at least 2; each has the GPUs and the batch of the plan."""
    link_bytes_s: float
    """Bandwidth between an island and the others, one direction, bytes/s."""
    steps: int = IslandOptions.island_steps
    """Optimizer steps between two exchanges (H)."""
    compression: Compression = field(default_factory=Compression)
    """How pseudo-gradients are sent."""
    overlap_steps: int = IslandOptions.island_overlap_steps
    """Steps that train while a round exchanges."""
    fragments: int = IslandOptions.island_fragments
    """Parts of the parameters, of whole layers, that have rounds of their own."""

    def __post_init__(self) -> None:
        if self.count < 2:
            raise UsageError(
                f"{spelled('islands')} is {self.count}: give at least 2, or leave it out to plan for one place"
            )
        if self.steps < 1:
            raise UsageError(
                f"{spelled('island_steps')} is {self.steps}: give a number of steps of at least 1, such as 100"
            )
        if not 1 <= self.fragments <= self.steps:
            raise UsageError(
                f"{spelled('island_fragments')} is {self.fragments}: give at least 1 and at most "
                f"{spelled('island_steps')} ({self.steps})"
            )
        if not 0 <= self.overlap_steps < self.steps // self.fragments:
            raise UsageError(
                f"{spelled('island_overlap_steps')} is {self.overlap_steps}: give at least 0 and less than the "
                f"{self.steps // self.fragments} steps between two rounds"
            )


@dataclass(frozen=True, kw_only=True)
class IslandsVerdict:
    """Holds the throughput of the ways to use several islands, tokens/s over all of them, and what follows."""

    islands: int
    """Number of islands."""
    steps: int
    """Steps between two exchanges."""
    fragments: int
    """Parts of the parameters that have exchanges of their own."""
    bytes_per_round: int
    """Bytes that an island sends in an exchange; with fragments, in that of the largest one."""
    round_s: float
    """Seconds of this exchange."""
    stall_fraction: float
    """Share of the time that the islands wait in exchanges."""
    bytes_per_token: float
    """Bytes that an island sends per token that it trains on."""
    ddp_bytes_per_token: float
    """The same with an all-reduce of the gradients at every step."""
    host_gib: float
    """Host memory of an island for parameters, momentum and what was not sent yet, fp32, GiB."""
    one_island: float
    """Tokens/s of one island alone."""
    diloco: float
    """Tokens/s with DiLoCo."""
    ddp: float
    """Tokens/s with DDP or HSDP, whose gradients are all-reduced over the link at every step."""
    fsdp2: float
    """Tokens/s with FSDP2 sharded over all islands, whose parameters and gradients cross the link."""
    hours: float | None
    """Hours to train on all tokens with DiLoCo, without interruptions; None where their number is not known."""
    pays: bool
    """Whether DiLoCo is faster than every other way."""
    reason: str
    """Why, as a sentence."""

    def to_dict(self) -> dict[str, Any]:
        """Return the key `islands` of `hfscale plan --json`."""
        return asdict(self)


def judge_islands(
    estimate: Estimate, islands: Islands, tokens: float | None = None
) -> IslandsVerdict:
    """Compare islands with one island alone and with DDP and FSDP2 over the same link.

    Args:
        estimate (`Estimate`): one island: its job and the duration of its step.
        islands (`Islands`): the islands and the link.
        tokens (`float`, *optional*): tokens to train on, all islands together.

    Raises:
        UsageError: there are more fragments than layers.
    """
    job = estimate.job
    step_s = estimate.time.total
    trained = int(trained_parameters(job))
    count = islands.count
    link = islands.link_bytes_s
    payloads = [
        islands.compression.bytes_of(values)
        for values in _fragments(job, trained, islands.fragments)
    ]
    # The islands upload at the same time; then island 0 sends to each of the others what it does not have.
    rounds_s = [payload * (1 + (count - 1) ** 2) / link for payload in payloads]
    waits_s = sum(max(0.0, round_s - islands.overlap_steps * step_s) for round_s in rounds_s)
    period_s = islands.steps * step_s + waits_s
    all_tokens = count * job.tokens_per_step

    overlap = find_framework(job.stack).overlap_dp
    gradient = find_framework(job.stack).gradient_bytes * trained
    # An all-reduce in a ring of islands; it overlaps with the backward pass of the last micro-batch, two thirds of it.
    reduced = 2 * (count - 1) / count * gradient
    backward_s = estimate.time.compute / job.micro_batches * 2 / 3
    ddp_s = step_s + exposed_s(reduced / link, backward_s, overlap)
    # Every byte of a ring over all ranks enters and leaves each island once: parameters before both passes of each
    # micro-batch, gradients after the second one.
    gathered = job.micro_batches * (2 * 2.0 * job.shape.total_parameters + gradient)
    fsdp2_s = step_s + exposed_s(gathered / link, estimate.time.compute, overlap)

    one_island = job.tokens_per_step / step_s
    diloco = islands.steps * all_tokens / period_s
    ddp = all_tokens / ddp_s
    fsdp2 = all_tokens / fsdp2_s
    others = {
        "one island alone": one_island,
        "DDP or HSDP over the link": ddp,
        "FSDP2 over the link": fsdp2,
    }
    best = max(others, key=lambda name: others[name])
    pays = diloco > GAIN * others[best]
    enough = math.ceil(waits_s * (1 - STALLED) / STALLED / step_s)
    if pays:
        reason = f"DiLoCo is {diloco / others[best]:.2f} times as fast as {best}, the next best way"
    elif best == "one island alone":
        reason = "one island alone is as fast: exchange less often (--island-steps) or in fewer bits (--island-bits)"
    else:
        reason = f"{best} is as fast, and its results do not differ from those of one place"
    if enough > islands.steps:
        reason += f"; with --island-steps {enough} the islands wait {STALLED:.0%} of the time"
    return IslandsVerdict(
        islands=count,
        steps=islands.steps,
        fragments=islands.fragments,
        bytes_per_round=max(payloads),
        round_s=max(rounds_s),
        stall_fraction=waits_s / period_s,
        bytes_per_token=sum(payloads) / (islands.steps * job.tokens_per_step),
        ddp_bytes_per_token=reduced / job.tokens_per_step,
        host_gib=4.0 * trained * (2 if islands.compression.lossless else 3) / GIB,
        one_island=one_island,
        diloco=diloco,
        ddp=ddp,
        fsdp2=fsdp2,
        hours=None if tokens is None else tokens / diloco / 3600,
        pays=pays,
        reason=reason,
    )


def _fragments(job: Job, trained: int, fragments: int) -> list[int]:
    """Return the values of each fragment f: the layers f modulo `fragments`, and in the last one all else."""
    layers = job.shape.layers
    if fragments > layers:
        raise UsageError(
            f"{spelled('island_fragments')} is {fragments}: the model has {layers} layers; give at most as many"
        )
    in_layers = job.shape.layers_parameters if job.method == "full" else trained
    sizes = [
        in_layers * len(range(fragment, layers, fragments)) // layers
        for fragment in range(fragments)
    ]
    return [*sizes[:-1], trained - sum(sizes[:-1])]
