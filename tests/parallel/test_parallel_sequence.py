"""Sequence parallelism and the loss over a sharded vocabulary: training is the same, and no rank has full tensors."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from parallel_families import compare, small_config
from parallel_world import LENGTH, VOCAB, in_world, tiny_config
from test_parallel import BALANCED, CUBE, LORA, TIED, check, wrong
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from hfscale.errors import UnsupportedModelError
from hfscale.facts.support import (
    PIPELINE_TESTED,
    SEQUENCE_PARALLEL_TESTED,
    TENSOR_PARALLEL_UNSUPPORTED,
    Combination,
    why_not,
)
from hfscale.parallel.losses import VocabParallelLoss, keep_logits_sharded
from hfscale.parallel.partition import ModelStructure
from hfscale.parallel.sequence import plan_sequence_parallel
from hfscale.parallel.tensor import tensor_parallel_plan

SEQUENCE = CUBE | {"sequence_parallel": True}


@pytest.mark.faults
def test_training_is_the_same_with_sequence_parallelism_under_every_layout():
    """One layout is in the ordinary suite, in test_parallel.py."""
    recomputed = {"activation_checkpointing": True}
    names = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV")
    check(4, [{"parallel": SEQUENCE | {"pipeline_schedule": name}, "data": {"packed": True}} for name in names])
    alone = {"parallel": {"tp_size": 2, "sequence_parallel": True}, "data": {"packed": True}, "args": recomputed}
    smoothed = recomputed | {"label_smoothing_factor": 0.1, "max_grad_norm": 0.1}
    padded = {"parallel": SEQUENCE, "data": {"ragged": True}, "args": smoothed, "model": TIED}
    check(
        4,
        [
            {"parallel": SEQUENCE, "lora": LORA},
            {"parallel": SEQUENCE, "family": "qwen3"},
            alone | {"model": TIED},
            padded,
        ],
    )
    check(8, [{"parallel": SEQUENCE, "model": TIED, "empty": True}, {"parallel": SEQUENCE | {"dp_replicate_size": 2}}])


def sharded_losses(job):
    """The difference of losses and gradients between logits sharded over the world and full ones; then a refusal."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 8 * world, generator=generator) * 20
    labels = torch.randint(0, 8 * world, (3, 5), generator=generator)
    labels[:, 1:3] = -100
    differences = {}
    for epsilon in (0.0, 0.1):
        for items in (None, 7, torch.tensor(11)):
            full = logits.clone().requires_grad_()
            if epsilon:
                expected = LabelSmoother(epsilon)({"logits": full}, labels, True, num_items_in_batch=items)
            else:
                expected = ForCausalLMLoss(full, labels, 8 * world, num_items_in_batch=items)
            expected.backward()
            local = logits.chunk(world, dim=-1)[rank].clone().requires_grad_()
            loss = VocabParallelLoss(group=dist.group.WORLD, vocabulary=8 * world, epsilon=epsilon)
            if epsilon:
                found = loss.of_output({"logits": local}, labels, True, num_items_in_batch=items)
            else:
                found = loss(local, labels, 8 * world, num_items_in_batch=items)
            (found * 3).backward()
            gradient = (local.grad / 3 - full.grad.chunk(world, dim=-1)[rank]).abs().max()
            difference = abs(found.item() - expected.item()) / max(1.0, expected.item())
            differences[f"{epsilon} {items}"] = max(difference, gradient.item())
    try:
        loss(local, labels, 8 * world + 1)
    except UnsupportedModelError as error:
        return differences, str(error)
    return differences, ""


@pytest.mark.long
def test_losses_of_sharded_logits_and_shapes_of_tensors_on_a_rank():
    ((differences, message),) = in_world(2, sharded_losses, [None])
    assert len(differences) == 6
    assert max(differences.values()) < 2e-6, differences
    assert "17" in message
    assert "tp_size=1" in message

    jobs = {
        "without": {"family": "llama", "tp": 2},
        "with": {"family": "llama", "tp": 2, "sequence": True},
        "odd": {"family": "llama", "tp": 2, "sequence": True, "length": 11},
    }
    found = in_world(2, compare, list(jobs.values()))
    assert wrong(jobs, found) == {}
    without, with_sequence = ({tuple(shape) for shape in result["shapes"]} for result in found[:2])
    wide = {shape for shape in without | with_sequence if shape[-1] == VOCAB}
    assert wide == set()  # of 96 vocabulary entries each rank has 48
    assert (2, LENGTH, VOCAB // 2) in without & with_sequence
    # Norms and residuals: of the complete sequence on both ranks without sequence parallelism, of half of it with.
    assert (2, LENGTH, 1) in without  # the mean square of a token
    assert (2, LENGTH, 1) not in with_sequence
    assert (2, LENGTH // 2, 1) in with_sequence


@pytest.mark.faults
@pytest.mark.parametrize("family", sorted(SEQUENCE_PARALLEL_TESTED))
def test_every_family_with_sequence_parallelism(family):
    jobs = {
        "tp": {"family": family, "tp": 2, "sequence": True, "length": 11},
        "pp": {"family": family, "tp": 2, "pp": 2, "sequence": True},
    }
    assert wrong(jobs, in_world(4, compare, list(jobs.values()))) == {}


@pytest.mark.faults
def test_logits_are_complete_where_a_custom_loss_needs_them():
    jobs = {
        f"sequence parallel: {is_on}": {"family": "llama", "tp": 2, "sequence": is_on, "shard_logits": False}
        for is_on in (True, False)
    }
    found = in_world(2, compare, list(jobs.values()))
    assert wrong(jobs, found) == {}
    assert all([2, LENGTH, VOCAB] in result["shapes"] for result in found)


@pytest.mark.faults
def test_the_load_balancing_of_experts_with_sequence_parallelism():
    job = {"family": "mixtral", "tp": 2, "pp": 2, "sequence": True, "config": BALANCED}
    assert wrong(["mixtral"], in_world(4, compare, [job])) == {}
    with pytest.raises(AssertionError, match="block_size=12"):
        in_world(4, compare, [job | {"length": 11}])


def sequence_plan(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    structure, plan = ModelStructure.of(model), tensor_parallel_plan(model, 2)
    assert keep_logits_sharded(model, plan, structure.head)
    return plan_sequence_parallel(model, structure, plan)


def test_the_plan_tells_sharded_and_replicated_blocks_and_parameters_of_local_tokens():
    plan = sequence_plan(tiny_config("qwen3"))
    layer = "model.layers.0"
    assert {name for name in plan.sharded if name.startswith(layer)} == {f"{layer}.self_attn", f"{layer}.mlp"}
    assert "lm_head" in plan.sharded
    assert plan.replicated == ()
    assert "model.norm.weight" in plan.local_tokens
    assert f"{layer}.input_layernorm.weight" in plan.local_tokens
    assert f"{layer}.self_attn.q_norm.weight" not in plan.local_tokens  # it sees all tokens, of this rank's heads
    experts = sequence_plan(small_config("mixtral"))
    assert {name.rpartition(".")[2] for name in experts.replicated} == {"mlp"}


def test_unsupported_families_are_refused():
    trained = Combination(engine="parallel_trainer")
    assert "set tp_size=1" in why_not(replace(trained, family="doge", tp=2))
    assert why_not(replace(trained, family="doge", tp=1)) is None
    assert TENSOR_PARALLEL_UNSUPPORTED.keys() <= PIPELINE_TESTED
    split = replace(trained, sequence_parallel=True)
    assert "tp_size=1 leaves one" in why_not(replace(split, family="llama", tp=1))
    assert "not tested with mamba" in why_not(replace(split, family="mamba", tp=2))
    assert why_not(replace(split, family="llama", tp=2)) is None
