"""Stages hold the buffers of what they receive only until a pass has used it, and compute what torch's own do."""

import pytest
import torch
import torch.distributed as dist
from parallel_world import in_world
from torch import nn
from torch.distributed.pipelining import PipelineStage

from hfscale.facts.schedules import SCHEDULES
from hfscale.parallel.pipeline import TORCH_SCHEDULES
from hfscale.parallel.receiving import ReceivingStage
from hfscale.parallel.stages import StagePlan

MICRO_BATCHES, ROWS, WIDTH = 16, 2, 4
PER_RANK = {"line": 1, "loop": 2, "v": 2}


def buffers(stages):
    """How many descriptors of receives hold a tensor."""
    held = 0
    for stage in stages:
        for by_micro_batch in (stage.args_recv_info, stage.grad_recv_info):
            for descriptors in by_micro_batch.values():
                held += sum(one.buffer is not None and one.buffer.device.type != "meta" for one in descriptors)
    return held


def run(job):
    """Two steps of a pipeline with the stages of `job`: the gradients, and how many buffers are held in a forward or
    backward pass at most and after a step."""
    kind = {"torch": PipelineStage, "hfscale": ReceivingStage}[job["stages"]]
    plan = StagePlan(schedule=job["schedule"], pp=2, virtual_stages=job["per_rank"])
    hidden = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    stages, modules, most = [], [], 0
    for number in plan.stages_of(dist.get_rank()):
        torch.manual_seed(number)
        modules.append(nn.Linear(WIDTH, WIDTH))
        stages.append(
            kind(modules[-1], number, plan.stages, torch.device("cpu"), input_args=hidden, output_args=hidden)
        )
    for stage in stages:
        stage.of_rank = stages

    def count(*_):
        nonlocal most
        most = max(most, buffers(stages))

    for module in modules:
        module.register_forward_hook(count)
        module.weight.register_hook(count)
    schedule = TORCH_SCHEDULES[plan.schedule](
        stages[0] if SCHEDULES[plan.schedule] == "line" else stages,
        n_microbatches=MICRO_BATCHES,
        loss_fn=lambda output, target: (output - target).square().sum(),
    )
    torch.manual_seed(0)
    inputs = torch.randn(2, MICRO_BATCHES * ROWS, WIDTH)
    has_last = any(stage.is_last for stage in stages)
    has_first = any(stage.is_first for stage in stages)
    for given in inputs:
        schedule.step(*([given] if has_first else []), target=given if has_last else None)
    gradients = [module.weight.grad.tolist() for module in modules]
    results = [None] * 2
    dist.all_gather_object(results, {"gradients": gradients, "most": most, "after": buffers(stages)})
    return results


@pytest.fixture(scope="module")
def results():
    """The results of both ranks, by schedule and kind of stages."""
    cases = [(schedule, kind) for schedule in SCHEDULES for kind in ("torch", "hfscale")]
    jobs = [
        {"schedule": schedule, "per_rank": PER_RANK[SCHEDULES[schedule]], "stages": kind} for schedule, kind in cases
    ]
    return dict(zip(cases, in_world(2, run, jobs), strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_received_is_held_until_its_pass_has_run(results, schedule):
    for own, of_torch in zip(results[schedule, "hfscale"], results[schedule, "torch"], strict=True):
        assert own["gradients"] == of_torch["gradients"]
        assert own["after"] == 0
        assert own["most"] <= 2 * PER_RANK[SCHEDULES[schedule]]  # of 16 micro-batches, in two directions
