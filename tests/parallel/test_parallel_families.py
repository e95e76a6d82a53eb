"""Families with a tensor-parallel plan or a shape: their stages, run in turn, compute what the unsplit model does."""

import pytest
import torch
from parallel_families import families_with_plan, small_config
from parallel_world import VOCAB
from transformers import AutoModelForCausalLM

from hfscale.errors import UsageError
from hfscale.facts.families import FAMILIES
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import PIPELINE_TESTED, PIPELINE_UNSUPPORTED
from hfscale.parallel.checks import check_config
from hfscale.parallel.partition import ModelStructure, layer_costs, partition_by_cost, stage_view
from hfscale.parallel.pipeline import Stage
from hfscale.parallel.stages import StagePlan
from hfscale.parallel.weights import build_model

NOT_SMALL = {
    "bailing_hybrid",
    "cohere_compass_text",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2_moe",
    "llama4",
    "phi4_multimodal",
    "qwen4_exp_text",
}
"""Families whose config cannot be made small by sizes alone: not tested."""


def loss_of(view, inputs):
    return view(**inputs, use_cache=False).loss


def gradient_norm(model):
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    model.zero_grad()
    return norm


def test_every_family_with_a_plan_or_a_shape_is_listed():
    assert {*PIPELINE_TESTED, *PIPELINE_UNSUPPORTED, *NOT_SMALL} == {*families_with_plan(), *FAMILIES}
    assert not PIPELINE_TESTED & {*PIPELINE_UNSUPPORTED, *NOT_SMALL}


def in_either_suite(families):
    """Every fifth family in the ordinary suite, the others in the long one."""
    return [
        pytest.param(family, marks=[pytest.mark.faults] if number % 5 else [])
        for number, family in enumerate(sorted(families))
    ]


@pytest.mark.parametrize("family", in_either_suite(PIPELINE_TESTED))
def test_stages_compute_what_the_unsplit_model_does(family):
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(small_config(family)).num_parameters()
    assert size < 10**8
    model = build_model(small_config(family), seed=5, dtype=torch.float32).train()
    rows = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    expected = gradient_norm(model)

    structure = ModelStructure.of(model)
    hidden = rows
    for spec in partition_by_cost(*layer_costs(model, structure), 3):
        stage = Stage(stage_view(model, structure, spec), structure, spec, loss_of)
        hidden = stage(hidden, labels=rows)
    hidden.backward()
    assert hidden.item() == pytest.approx(loss.item(), abs=5e-6)
    assert gradient_norm(model) == pytest.approx(expected, rel=1e-5)


def check_two_stages(family):
    config = small_config("llama")
    config.model_type = family
    check_config(config, ParallelLayout(pp=2), StagePlan(pp=2))


def test_an_unsupported_family_is_refused_and_an_untested_one_is_logged(caplog):
    with pytest.raises(UsageError, match="nanochat"):
        check_two_stages("nanochat")
    check_two_stages("llama")
    assert not caplog.records
    with caplog.at_level("WARNING"):
        check_two_stages("of_tomorrow")
