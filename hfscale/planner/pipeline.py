"""How `ParallelTrainer` deals layers to pipeline ranks, and what its schedules hold and wait.

The arithmetic of `hfscale.parallel` (stages.py, partition.py) without its torch; tests/test_planner_pipeline.py holds
the two against each other. `held` and `waits` are the formulas of stages.py, which names their sources.
"""

import math
from functools import lru_cache

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBV",
    "dualpipev": "DualPipeV",
}
"""The planner's schedules, and what `--pipeline_schedule` calls them; `1f1b` of several stages per rank is
`Interleaved1F1B`."""
V_SHAPED = ("zbv", "dualpipev")
"""Schedules with two stages per rank, there and back, so that the first rank holds both ends of the model."""
SPLIT_BACKWARD = ("zero_bubble", *V_SHAPED)
"""Schedules that put off the gradients of the weights; with recomputation those would hold what was recomputed."""


def flag_of(schedule: str, virtual_stages: int) -> str:
    """What `--pipeline_schedule` calls a schedule."""
    return "Interleaved1F1B" if schedule == "1f1b" and virtual_stages > 1 else SCHEDULES[schedule]


def stage_layers(layers: int, head: float, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as `hfscale.parallel.partition.cut_by_cost` deals them.

    Args:
        layers (`int`): Of the model, taken as equally dear.
        head (`float`): Cost of the head, which is the last stage's, in layers.
        stages (`int`): How many.
    """
    dealt = []
    for left in range(stages, 0, -1):
        dealt.append(_dealt(layers, head, left)[2])
        layers -= dealt[-1]
    return tuple(dealt)


@lru_cache(maxsize=65536)
def _dealt(layers: int, head: float, stages: int) -> tuple[float, float, int]:
    """Of the last `stages` stages with so many layers: the slowest one's cost, the sum of the costs' squares, and the
    layers of the first of them; the least in that order."""
    if stages == 1:
        return layers + head, (layers + head) ** 2, layers
    # A stage is about as large as the others with the head among them, or without.
    averages = (layers + head) / stages, (layers - 1) / (stages - 1)
    least = max(1, math.floor(min(averages)) - 1)
    best = None
    for here in range(min(least, layers - stages + 1), min(math.ceil(max(averages)) + 1, layers - stages + 1) + 1):
        slowest, squares, _ = _dealt(layers - here, head, stages - 1)
        found = (max(float(here), slowest), here**2 + squares, here)
        best = found if best is None else min(best, found)
    assert best is not None
    return best


@lru_cache(maxsize=4096)
def rank_layers(layers: int, head: float, pp: int, virtual_stages: int, schedule: str) -> tuple[int, ...]:
    """Layers of each pipeline rank; arguments as in `stage_layers`."""
    stages = stage_layers(layers, head, pp * virtual_stages)
    if schedule in V_SHAPED:
        return tuple(stages[rank] + stages[2 * pp - 1 - rank] for rank in range(pp))
    return tuple(sum(stages[rank::pp]) for rank in range(pp))


def in_flight(schedule: str, pp: int, virtual_stages: int, micro_batches: int, rank: int) -> float:
    """Micro-batches whose activations a pipeline rank holds at once, counted in its share of the layers."""
    if pp == 1:
        return 1.0
    if schedule == "gpipe":
        return float(micro_batches)
    if schedule == "1f1b" and virtual_stages == 1:
        most = float(pp - rank)
    else:
        most = {"zbv": float(pp), "dualpipev": pp + 0.5}.get(schedule, pp + (pp - 1) / virtual_stages)
    return min(most, float(micro_batches))


def bubble_fraction(schedule: str, virtual_stages: int, forward: float, inputs: float, weights: float) -> float:
    """A rank's idle time over that of 1F1B with one stage per rank, whose is (p-1) (F+B).

    Args:
        forward, inputs, weights (`float`): Seconds of a rank's forward pass and of the two halves of its backward
            pass, B = I + W.
    """
    whole = forward + inputs + weights
    if schedule in V_SHAPED:
        return max(forward, inputs) / 2 / whole
    part = max(0.0, forward + inputs - weights) / whole if schedule == "zero_bubble" else 1.0
    return part / virtual_stages


def supports(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> bool:
    """Whether the schedule can run so many micro-batches in a step."""
    if schedule == "dualpipev":
        return micro_batches >= 2 * pp
    is_dealt_round = schedule == "zero_bubble" or (schedule == "1f1b" and virtual_stages > 1)
    rounds = max(1, micro_batches // pp) if is_dealt_round else 1
    return micro_batches >= pp and micro_batches % rounds == 0
