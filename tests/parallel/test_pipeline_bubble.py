"""The share of a schedule's time in which ranks wait, and what they hold: the formulas compared with torch's own order
of actions, and the measurement of the wait compared with its formula."""

import pytest
import torch
import torch.distributed as dist
from parallel_world import in_world
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.pipeline_bubble import bubble
from hfscale.facts.schedules import SCHEDULES, held_at_peak
from hfscale.parallel.pipeline import TORCH_SCHEDULES
from hfscale.parallel.stages import StagePlan

SIZES = [(2, 8, 2), (4, 8, 2), (4, 32, 2), (8, 32, 2), (8, 32, 4)]
NAMES = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}


def actions_of(plan, micro_batches):
    """The actions of each rank, in torch's order: (stage, micro-batch, F, I, W or B)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.pp)
    try:
        nothing = torch.zeros(1, 2)
        stages = [
            PipelineStage(
                torch.nn.Linear(2, 2),
                number,
                plan.stages,
                torch.device("cpu"),
                input_args=nothing,
                output_args=nothing,
            )
            for number in plan.stages_of(0)
        ]
        order = TORCH_SCHEDULES[plan.schedule](stages, micro_batches, loss_fn=torch.sub).pipeline_order
    finally:
        dist.destroy_process_group()
    return {
        rank: [
            (part.stage_index, part.microbatch_index, NAMES[part.computation_type.name])
            for action in actions
            if action is not None
            for part in action.sub_actions or [action]
        ]
        for rank, actions in order.items()
    }


def simulated_bubble(plan, todo):
    """The idle fraction of a simulation in which each action starts after the previous one of its rank, and after
    those whose results it needs."""
    takes = {"F": 1 / plan.per_rank, "I": 1 / plan.per_rank, "W": 1 / plan.per_rank, "B": 2 / plan.per_rank}
    ended, clock, busy = {}, dict.fromkeys(todo, 0.0), 0.0
    todo = {rank: list(actions) for rank, actions in todo.items()}
    while any(todo.values()):
        before = busy
        for rank, actions in todo.items():
            while actions:
                stage, number, kind = actions[0]
                needs = {
                    "F": [(stage - 1, number, "F")] if stage else [],
                    "W": [(stage, number, "I")],
                }.get(kind, [(stage, number, "F")] + ([(stage + 1, number, "I")] if stage + 1 < plan.stages else []))
                if any(need not in ended for need in needs):
                    break
                clock[rank] = max([clock[rank], *(ended[need] for need in needs)]) + takes[kind]
                ended[stage, number, "I" if kind == "B" else kind] = clock[rank]
                busy += takes[kind]
                del actions[0]
        assert busy > before, "the schedule never ends"
    return 1 - busy / (plan.pp * max(clock.values()))


@pytest.mark.parametrize("schedule", [name for name, shape in SCHEDULES.items() if shape != "line"])
def test_the_formulas_agree_with_the_order_of_torch(schedule):
    for pp, micro_batches, stages in SIZES:
        if SCHEDULES[schedule] == "v" and stages != 2:
            continue
        plan = StagePlan(schedule=schedule, pp=pp, virtual_stages=stages)
        expected = simulated_bubble(plan, actions_of(plan, micro_batches))
        assert plan.bubble_fraction(micro_batches) == pytest.approx(expected), (pp, micro_batches, stages)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_formula_of_one_stage_per_rank(schedule):
    for pp, micro_batches in ((2, 8), (4, 12)):
        expected = (pp - 1) / (micro_batches + pp - 1)  # Huang et al., Narayanan et al.
        assert StagePlan(schedule=schedule, pp=pp).bubble_fraction(micro_batches) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", [name for name, shape in SCHEDULES.items() if shape != "line"])
def test_the_chunks_that_ranks_hold_are_those_of_the_order_of_torch(schedule):
    for pp, micro_batches, stages in (*SIZES, (3, 6, 3), (4, 4, 2), (4, 6, 2)):
        plan = StagePlan(schedule=schedule, pp=pp, virtual_stages=None if SCHEDULES[schedule] == "v" else stages)
        if not plan.supports(micro_batches):
            continue
        for rank, actions in actions_of(plan, micro_batches).items():
            moments = held_at_peak(
                schedule, pp=pp, stages_per_rank=plan.per_rank, micro_batches=micro_batches, rank=rank
            )
            for gradients in (0.0, 0.3, 0.7):  # bytes of a chunk that waits, relative to what it keeps anyway
                found = max(held.bytes(1.0, gradients) for held in moments)
                expected = max(held + gradients * waiting for held, waiting in held_after_each(actions))
                case = (pp, micro_batches, stages, rank, gradients)
                if schedule == "ZBV" and micro_batches < 2 * pp:
                    assert expected <= found <= 1.25 * expected, case
                else:
                    assert found == pytest.approx(expected), case


def held_after_each(actions):
    """The chunks that a rank holds after each action, and how many of them wait for the gradients of the weights."""
    held = waiting = 0
    for _, _, kind in actions:
        held += (kind == "F") - (kind in "WB")
        waiting += (kind == "I") - (kind == "W")
        yield held, waiting


def measured(job):
    return bubble(*job)


@pytest.mark.timing
@pytest.mark.faults
def test_the_measurement_is_close_to_the_formula(tmp_path):
    """The measurement includes the wait of ranks that finish first; without it, it is 0.76 of the formula."""
    (found,) = in_world(4, measured, [("1F1B", str(tmp_path))])
    assert 0.9 < found["measured"] / found["formula"] < 1.4  # other load on the machine only adds to it
