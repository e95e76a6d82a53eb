"""Pipeline schedules: which rank holds which layers, how many micro-batches it holds at once, and how long it idles.

Symbols: p pipeline ranks, v stages per rank, m micro-batches per step; F is a rank's forward pass of one micro-batch,
I and W the two halves of its backward pass (gradients of the inputs and of the weights), B = I + W.

| name | stages per rank | idle time per rank | micro-batches held | source |
|---|---|---|---|---|
| GPipe | 1 | (p-1)(F+B) | m | Huang et al., arXiv 1811.06965 |
| 1F1B | 1 | (p-1)(F+B) | p - rank | Narayanan et al., arXiv 2006.09503 |
| Interleaved1F1B | v | (p-1)(F+B)/v | p + (p-1-2 rank)/v | Narayanan et al., arXiv 2104.04473 |
| InterleavedZeroBubble | v | (p-1)(F+I-W)/v | p | ZB-H1 of Qi et al., arXiv 2401.10241 |
| ZBV | 2, in a V | (p-1) max(F, I)/2 | p | section 6 of the same |
| DualPipeV | 2, in a V | (p-1) max(F, I)/2 | p + 1/2 | DeepSeek-V3, arXiv 2412.19437; V-shaped by Qi et al. |

A rank never holds more than m micro-batches. They are counted in the rank's share of the layers, so that one
micro-batch in all v stages of the rank counts as 1. The loops hold more if p does not divide m (`held_at_peak`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Placement = Literal["line", "loop", "v"]
"""How stages are assigned to ranks: `line`: one per rank; `loop`: several per rank, assigned in turn; `v`: two per
rank, from the first rank to the last and back."""

SCHEDULES: Mapping[str, Placement] = {
    "GPipe": "line",
    "1F1B": "line",
    "Interleaved1F1B": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBV": "v",
    "DualPipeV": "v",
}
"""Every schedule by its name in `--pipeline_schedule`, which is that of torch.distributed.pipelining, and its
placement of stages."""

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBV", "DualPipeV")
"""Schedules that compute the weights' gradients later than the inputs'. With recomputation they would keep what was
recomputed until then."""

PAIRED_PASSES = ("DualPipeV",)
"""Schedules that pair forward passes with backward passes of other micro-batches, so that one can compute while the
other communicates."""

PLANNER_SCHEDULES: Mapping[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBV",
    "dualpipev": "DualPipeV",
}
"""Names that `hfscale estimate --schedule` takes, and their schedules; see also `schedule_name`."""


def schedule_name(planner_name: str, stages_per_rank: int) -> str:
    """Return the name in `SCHEDULES` of a schedule of the planner.

    Args:
        planner_name (`str`): a name in `PLANNER_SCHEDULES`.
        stages_per_rank (`int`): stages that each rank holds; `1f1b` with several of them is `Interleaved1F1B`.
    """
    if planner_name == "1f1b" and stages_per_rank > 1:
        return "Interleaved1F1B"
    return PLANNER_SCHEDULES[planner_name]


# -- what a schedule costs --------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """What a pipeline rank holds at one moment, in chunks: micro-batches in one of its stages."""

    chunks: int
    """Chunks whose activations the rank holds."""
    waiting: int = 0
    """Those of them whose gradients of the weights are still to be computed, when those of the inputs are there."""

    def bytes(self, kept: float, gradients: float) -> float:
        """Compute the bytes held.

        Args:
            kept (`float`): bytes that a chunk keeps for its backward pass.
            gradients (`float`): bytes that it keeps in addition while it waits for the gradients of the weights.
        """
        return self.chunks * kept + self.waiting * gradients


def held_at_peak(
    schedule: str, *, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> tuple[Held, ...]:
    """Count the chunks that a pipeline rank holds at the moments at one of which it holds most bytes.

    The counts are those of the schedules of torch 2.13 (distributed/pipelining/schedules.py,
    `_calculate_single_rank_operations` of each class). With fewer than 2p micro-batches ZBV may hold fewer.

    Args:
        schedule (`str`): a name in `SCHEDULES`.
        pp (`int`): pipeline ranks.
        stages_per_rank (`int`): stages that each rank holds.
        micro_batches (`int`): micro-batches per optimizer step.
        rank (`int`): the pipeline rank, from 0.
    """
    if pp == 1:
        return (Held(stages_per_rank),)
    all_chunks = micro_batches * stages_per_rank
    of_a_round = micro_batches // max(1, micro_batches // pp)
    in_earlier_stages = (stages_per_rank - 1) * of_a_round
    if schedule == "ZBV":
        most = Held(min(2 * pp, micro_batches + rank + 1), 1)
        most_waiting = Held(pp + rank, min(2 * rank, 2 * (micro_batches - pp)) + 1)
        return (most, most_waiting) if most_waiting.waiting > 1 else (most,)
    if schedule == "InterleavedZeroBubble":
        return (Held(min(in_earlier_stages + pp, all_chunks), rank + 1),)
    chunks = {
        "GPipe": all_chunks,
        "1F1B": pp - rank,
        "Interleaved1F1B": in_earlier_stages + 2 * (pp - 1 - rank) + 1,
        "DualPipeV": 2 * pp + 1,
    }[schedule]
    return (Held(min(chunks, all_chunks)),)


def in_flight(
    schedule: str, *, pp: int, stages_per_rank: int, micro_batches: int, rank: int
) -> float:
    """Count the micro-batches whose activations a pipeline rank holds at once.

    They are counted in the rank's share of the layers, so that the count need not be an integer.

    Args:
        schedule (`str`): a name in `SCHEDULES`.
        pp (`int`): pipeline ranks.
        stages_per_rank (`int`): stages that each rank holds.
        micro_batches (`int`): micro-batches per optimizer step.
        rank (`int`): the pipeline rank, from 0.
    """
    moments = held_at_peak(
        schedule, pp=pp, stages_per_rank=stages_per_rank, micro_batches=micro_batches, rank=rank
    )
    return max(held.chunks for held in moments) / stages_per_rank


def idle_relative_to_1f1b(
    schedule: str,
    *,
    stages_per_rank: int,
    forward: float,
    input_gradients: float,
    weight_gradients: float,
) -> float:
    """Compute a rank's idle time divided by that of 1F1B with one stage per rank, which is (p-1)(F+B).

    Args:
        schedule (`str`): a name in `SCHEDULES`.
        stages_per_rank (`int`): stages that each rank holds.
        forward, input_gradients, weight_gradients (`float`): seconds of a rank's F, I and W.
    """
    forward_and_backward = forward + input_gradients + weight_gradients
    if SCHEDULES[schedule] == "v":
        return max(forward, input_gradients) / 2 / forward_and_backward
    if schedule == "InterleavedZeroBubble":
        return (
            max(0.0, forward + input_gradients - weight_gradients)
            / forward_and_backward
            / stages_per_rank
        )
    return 1.0 / stages_per_rank


def bubble_fraction(schedule: str, *, pp: int, stages_per_rank: int, micro_batches: int) -> float:
    """Compute the share of the schedule's time that a rank idles.

    All passes are assumed to take the same time (F = I = W), stages to be equal, and communication to be free.

    Args:
        schedule (`str`): a name in `SCHEDULES`.
        pp (`int`): pipeline ranks.
        stages_per_rank (`int`): stages that each rank holds.
        micro_batches (`int`): micro-batches per optimizer step.
    """
    relative = idle_relative_to_1f1b(
        schedule,
        stages_per_rank=stages_per_rank,
        forward=1.0,
        input_gradients=1.0,
        weight_gradients=1.0,
    )
    idle = (pp - 1) * relative
    return idle / (idle + micro_batches)


def paired_share(schedule: str, *, pp: int, micro_batches: int) -> float:
    """Compute the share of a rank's forward passes that the schedule pairs with backward passes, on the first rank,
    which has the fewest: 2m - 3p + 1 of 2m in DualPipeV, counted in torch's schedule.

    Args:
        schedule (`str`): a name in `SCHEDULES`.
        pp (`int`): pipeline ranks.
        micro_batches (`int`): micro-batches per optimizer step.
    """
    if schedule not in PAIRED_PASSES or pp == 1:
        return 0.0
    return max(0.0, (2 * micro_batches - 3 * pp + 1) / (2 * micro_batches))


def supports(schedule: str, *, pp: int, stages_per_rank: int, micro_batches: int) -> bool:
    """Return whether the schedule runs with so many micro-batches per step, as torch.distributed.pipelining requires.

    Args:
        schedule (`str`): a name in `SCHEDULES`.
        pp (`int`): pipeline ranks.
        stages_per_rank (`int`): stages that each rank holds.
        micro_batches (`int`): micro-batches per optimizer step.
    """
    if pp == 1:
        return True
    if schedule == "DualPipeV":
        return micro_batches >= pp * stages_per_rank
    rounds = max(1, micro_batches // pp) if SCHEDULES[schedule] == "loop" else 1
    return micro_batches >= pp and micro_batches % rounds == 0


# -- which rank holds which layers ------------------------------------------------------------------------------------


def rank_of_stage(schedule: str, stage: int, pp: int) -> int:
    """Return the pipeline rank that holds a stage, both counted from 0.

    Args:
        schedule (`str`): a name in `SCHEDULES`.
        stage (`int`): the stage, from 0.
        pp (`int`): pipeline ranks.
    """
    if SCHEDULES[schedule] == "v" and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp


def stage_layers(layers: int, head: float, stages: int) -> tuple[int, ...]:
    """Divide layers among stages such that the slowest stage is as fast as possible.

    It gives what `hfscale.parallel.partition.partition_by_cost` gives for layers of equal cost, and is fast enough for
    a search; tests/planner/test_planner_pipeline.py compares them.

    Args:
        layers (`int`): layers of the model.
        head (`float`): cost of the head, which the last stage computes, in layers.
        stages (`int`): number of stages.

    Returns:
        `tuple[int, ...]`: Number of layers of each stage.
    """
    if stages == 1:
        return (layers,)

    def with_last(last: int) -> tuple[int, ...]:
        few, more = divmod(layers - last, stages - 1)
        return (*[few] * (stages - 1 - more), *[few + 1] * more, last)

    def cost(counts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        costs = (*counts[:-1], counts[-1] + head)
        return max(costs), sum(cost**2 for cost in costs), counts

    return min(map(with_last, range(1, layers - stages + 2)), key=cost)


@lru_cache(maxsize=4096)
def rank_layers(
    layers: int, head: float, pp: int, stages_per_rank: int, schedule: str
) -> tuple[int, ...]:
    """Count the layers of each pipeline rank if `stage_layers` divides them among the stages.

    Args:
        layers (`int`): layers of the model.
        head (`float`): cost of the head, which the last stage computes, in layers.
        pp (`int`): pipeline ranks.
        stages_per_rank (`int`): stages that each rank holds.
        schedule (`str`): a name in `SCHEDULES`.
    """
    counts = [0] * pp
    for stage, held in enumerate(stage_layers(layers, head, pp * stages_per_rank)):
        counts[rank_of_stage(schedule, stage, pp)] += held
    return tuple(counts)


# -- a schedule in time -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Describes one pass of one micro-batch on one rank."""

    rank: int
    """Pipeline rank, from 0."""
    micro_batch: int
    """Micro-batch, from 0."""
    is_forward: bool
    """Whether it is a forward pass; else a backward pass."""
    start: float
    """Time at which it begins, in the unit of the durations given."""
    end: float
    """Time at which it ends."""


def _pass_before(
    is_forward: bool, rank: int, micro_batch: int, *, last: int
) -> tuple[bool, int, int] | None:
    """The pass whose result a pass of a rank needs; None for the forward passes of the first rank."""
    if not is_forward and rank == last:
        return True, rank, micro_batch
    if not is_forward:
        return False, rank + 1, micro_batch
    if rank == 0:
        return None
    return True, rank - 1, micro_batch


def one_f_one_b(
    pp: int, micro_batches: int, *, forward: float = 1.0, backward: float = 2.0
) -> list[Slot]:
    """Simulate the 1F1B schedule, to draw it and to check its bubble.

    Rank r first runs p - r - 1 forward passes, then alternates one forward and one backward pass, then runs the
    remaining backward passes (Narayanan et al., PipeDream-Flush, arXiv 2006.09503).

    Args:
        pp (`int`): pipeline ranks, each with one stage.
        micro_batches (`int`): micro-batches per optimizer step.
        forward, backward (`float`): duration of a pass on one rank, in any unit.

    Returns:
        `list[Slot]`: The passes of all ranks; those of each rank are in the order of their time.
    """
    queues = [_order_on_rank(rank, pp, micro_batches) for rank in range(pp)]
    ended: dict[tuple[bool, int, int], float] = {}
    rank_is_free_at = [0.0] * pp
    slots = []
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                is_forward, micro_batch = queue[0]
                needs = _pass_before(is_forward, rank, micro_batch, last=pp - 1)
                # A rank runs its passes in a fixed order: it waits even if a later one could run already.
                if needs is not None and needs not in ended:
                    break
                queue.pop(0)
                start = rank_is_free_at[rank]
                if needs is not None:
                    start = max(start, ended[needs])
                end = start + (forward if is_forward else backward)
                ended[is_forward, rank, micro_batch] = end
                rank_is_free_at[rank] = end
                slots.append(
                    Slot(
                        rank=rank,
                        micro_batch=micro_batch,
                        is_forward=is_forward,
                        start=start,
                        end=end,
                    )
                )
    return slots


def _order_on_rank(rank: int, pp: int, micro_batches: int) -> list[tuple[bool, int]]:
    """The passes of a rank in order: whether it is a forward pass, and the micro-batch."""
    warmup = min(pp - rank - 1, micro_batches)
    order = [(True, number) for number in range(warmup)]
    for number in range(micro_batches):
        if number + warmup < micro_batches:
            order.append((True, number + warmup))
        order.append((False, number))
    return order
