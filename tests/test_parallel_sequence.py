"""Sequence parallelism and the loss over a cut vocabulary: the same training, and nothing whole where it is cut."""

import pytest
import torch
import torch.distributed as dist
from parallel_families import compare, small_config
from parallel_world import LENGTH, VOCAB, in_world, tiny_config
from test_parallel import BALANCED, CUBE, LORA, TIED, check, wrong
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.facts.parallel_families import PIPELINE_TESTED, SEQUENCE_PARALLEL_TESTED, TENSOR_PARALLEL_UNSUPPORTED
from hfscale.parallel.families import check_matrices, check_sequences
from hfscale.parallel.sequence import plan_sequences
from hfscale.parallel.structure import ModelStructure
from hfscale.parallel.tensor import tensor_parallel_plan
from hfscale.parallel.vocabulary import VocabularyLoss, leave_logits_cut

CUT = CUBE | {"sequence_parallel": True}


@pytest.mark.faults
def test_the_same_training_with_sequences_cut_in_every_way():  # one way is in the ordinary suite, in test_parallel.py
    recomputed = {"activation_checkpointing": True}
    names = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV")
    check(4, [{"parallel": CUT | {"pipeline_schedule": name}, "data": {"packed": True}} for name in names])
    alone = {"parallel": {"tp_size": 2, "sequence_parallel": True}, "data": {"packed": True}, "args": recomputed}
    smoothed = recomputed | {"label_smoothing_factor": 0.1, "max_grad_norm": 0.1}
    padded = {"parallel": CUT, "data": {"ragged": True}, "args": smoothed, "model": TIED}
    check(4, [{"parallel": CUT, "lora": LORA}, {"parallel": CUT, "family": "qwen3"}, alone | {"model": TIED}, padded])
    check(8, [{"parallel": CUT, "model": TIED, "empty": True}, {"parallel": CUT | {"dp_replicate_size": 2}}])


def cut_losses(job):
    """How far losses and gradients of logits cut over the world are from those of whole ones."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 8 * world, generator=generator) * 20
    labels = torch.randint(0, 8 * world, (3, 5), generator=generator)
    labels[:, 1:3] = -100
    far = {}
    for epsilon in (0.0, 0.1):
        for items in (None, 7, torch.tensor(11)):
            whole = logits.clone().requires_grad_()
            if epsilon:
                expected = LabelSmoother(epsilon)({"logits": whole}, labels, True, num_items_in_batch=items)
            else:
                expected = ForCausalLMLoss(whole, labels, 8 * world, num_items_in_batch=items)
            expected.backward()
            mine = logits.chunk(world, dim=-1)[rank].clone().requires_grad_()
            loss = VocabularyLoss(group=dist.group.WORLD)
            if epsilon:
                found = loss.smoother(epsilon)({"logits": mine}, labels, True, num_items_in_batch=items)
            else:
                found = loss(mine, labels, 8 * world, num_items_in_batch=items)
            (found * 3).backward()
            gradient = (mine.grad / 3 - whole.grad.chunk(world, dim=-1)[rank]).abs().max()
            loss_far = abs(found.item() - expected.item()) / max(1.0, expected.item())
            far[f"{epsilon} {items}"] = max(loss_far, gradient.item())
    try:
        loss(mine, labels, 8 * world + 1)
    except UnsupportedModelError as error:
        return far, str(error)
    return far, ""


def test_losses_of_cut_logits_and_tensors_on_a_rank():
    ((far, message),) = in_world(2, cut_losses, [None])
    assert len(far) == 6
    assert max(far.values()) < 2e-6, far
    assert message == "8 logits on each of 2 ranks are not a vocabulary of 17: set --tp_size 1"

    jobs = {
        "whole sequences": {"family": "llama", "tp": 2},
        "cut": {"family": "llama", "tp": 2, "sequence": True},
        "odd": {"family": "llama", "tp": 2, "sequence": True, "length": 11},
    }
    found = in_world(2, compare, list(jobs.values()))
    assert wrong(jobs, found) == {}
    without, cut = ({tuple(shape) for shape in result["shapes"]} for result in found[:2])
    wide = {shape for shape in without | cut if shape[-1] == VOCAB}
    assert wide == set()  # of 96 words each rank has 48
    assert (2, LENGTH, VOCAB // 2) in without & cut
    # Norms in fp32, residuals: whole on both ranks without, half a sequence with.
    assert (2, LENGTH, 1) in without  # the mean square of a token
    assert (2, LENGTH, 1) not in cut
    assert (2, LENGTH // 2, 1) in cut


@pytest.mark.faults
@pytest.mark.parametrize("family", sorted(SEQUENCE_PARALLEL_TESTED))
def test_every_family_with_sequences_cut(family):
    jobs = {
        "tp": {"family": family, "tp": 2, "sequence": True, "length": 11},
        "pp": {"family": family, "tp": 2, "pp": 2, "sequence": True},
    }
    assert wrong(jobs, in_world(4, compare, list(jobs.values()))) == {}


@pytest.mark.faults
def test_logits_that_a_loss_of_the_users_own_needs_are_whole():
    jobs = {
        f"sequences cut: {cut}": {"family": "llama", "tp": 2, "sequence": cut, "cut": False} for cut in (True, False)
    }
    found = in_world(2, compare, list(jobs.values()))
    assert wrong(jobs, found) == {}
    assert all([2, LENGTH, VOCAB] in result["shapes"] for result in found)


@pytest.mark.faults
def test_the_balance_of_experts_with_sequences_cut():
    job = {"family": "mixtral", "tp": 2, "pp": 2, "sequence": True, "config": BALANCED}
    assert wrong(["mixtral"], in_world(4, compare, [job])) == {}
    with pytest.raises(
        AssertionError, match="sequences of 11 that are cut would be padded to a multiple of 2: set --block_size 12"
    ):
        in_world(4, compare, [job | {"length": 11}])


def sequence_plan(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    structure, plan = ModelStructure.of(model), tensor_parallel_plan(model, 2)
    assert leave_logits_cut(model, plan, structure.head)
    return plan_sequences(model, structure, plan)


def test_what_is_lean_what_is_whole_and_what_is_on_its_own_tokens():
    plan = sequence_plan(tiny_config("qwen3"))
    layer = "model.layers.0"
    assert {name for name in plan.lean if name.startswith(layer)} == {f"{layer}.self_attn", f"{layer}.mlp"}
    assert "lm_head" in plan.lean
    assert plan.whole == ()
    assert "model.norm.weight" in plan.apart
    assert f"{layer}.input_layernorm.weight" in plan.apart
    assert f"{layer}.self_attn.q_norm.weight" not in plan.apart  # it sees all tokens, of its own heads
    experts = sequence_plan(small_config("mixtral"))
    assert {name.rpartition(".")[2] for name in experts.whole} == {"mlp"}


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(UsageError, match=r"--tp_size is 2: .* doge .*; set --tp_size 1"):
        check_matrices("doge", 2)
    check_matrices("doge", 1)
    assert TENSOR_PARALLEL_UNSUPPORTED.keys() <= PIPELINE_TESTED
    with pytest.raises(UsageError, match="--tp_size, which is 1: leave it out"):
        check_sequences("llama", 1)
    with pytest.raises(UsageError, match="--sequence_parallel was not shown to compute the same with mamba: leave it"):
        check_sequences("mamba", 2)
    check_sequences("llama", 2)
