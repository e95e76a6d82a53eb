"""Families of causal language models: their stages, run in turn, compute what the unsplit model does."""

import os
import signal

import pytest
import torch
from parallel_families import families_with_plan, parity, small_config
from parallel_world import VOCAB, in_world
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hfscale.errors import UnsupportedModelError, UsageError
from hfscale.facts.families import FAMILIES
from hfscale.facts.layout import ParallelLayout
from hfscale.facts.support import PIPELINE_TESTED_ALONE, PIPELINE_UNSUPPORTED, STAGES_TESTED
from hfscale.parallel.checks import check_config
from hfscale.parallel.partition import ModelStructure, layer_costs, partition_by_cost, stage_view
from hfscale.parallel.pipeline import Stage
from hfscale.parallel.stages import StagePlan
from hfscale.parallel.tracing import trace_structure
from hfscale.parallel.weights import build_model

NOT_SMALL = {
    "bailing_hybrid",
    "cohere_compass_text",
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
    assert {*STAGES_TESTED, *PIPELINE_UNSUPPORTED, *NOT_SMALL} >= {*families_with_plan(), *FAMILIES}
    assert not STAGES_TESTED & {*PIPELINE_UNSUPPORTED, *NOT_SMALL}


def in_either_suite(families):
    """Every fifth family in the ordinary suite, the others in the long one."""
    return [
        pytest.param(family, marks=[pytest.mark.faults] if number % 5 else [])
        for number, family in enumerate(sorted(families))
    ]


def differences_of_stages(family):
    """The differences of loss and gradient norm between three stages, run in turn, and the unsplit model."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(small_config(family))
    assert empty.num_parameters() < 10**8
    model = build_model(small_config(family), seed=5, dtype=torch.float32).train()
    rows = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    loss.backward()
    expected = gradient_norm(model)

    structure = trace_structure(model, ModelStructure.of(model))
    assert trace_structure(empty, ModelStructure.of(empty)) == structure
    hidden = rows
    for spec in partition_by_cost(*layer_costs(model, structure), min(3, structure.depth)):
        stage = Stage(stage_view(model, structure, spec), structure, spec, loss_of)
        hidden = stage(hidden, labels=rows)
    hidden.backward()
    return abs(hidden.item() - loss.item()), abs(gradient_norm(model) - expected) / expected


@pytest.mark.parametrize("family", in_either_suite(STAGES_TESTED))
def test_stages_compute_what_the_unsplit_model_does(family):
    loss, norm = differences_of_stages(family)
    assert loss < 5e-6
    assert norm < 1e-5


def test_a_decoder_that_changes_what_it_is_given_is_refused():
    with pytest.raises(UnsupportedModelError, match="in place"):
        differences_of_stages("ctrl")


def result_of_stages(family):
    """`right`, `wrong`, `refused` or `not small` of a family, found in a process of its own that has a minute."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            result = "right" if max(differences_of_stages(family)) < 1e-5 else "wrong"
        except UnsupportedModelError:
            result = "refused"
        except Exception:  # of the family's config or model
            result = "not small"
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result or "not small"


@pytest.mark.recipes
@pytest.mark.timeout(900)
def test_the_list_has_every_family_that_can_be_built_small():
    families = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    results = {family: result_of_stages(family) for family in sorted(families)}
    assert [family for family, result in results.items() if result == "wrong"] == []
    assert {family for family, result in results.items() if result == "right"} == STAGES_TESTED


@pytest.mark.recipes
def test_families_without_a_shape_on_two_processes():
    jobs = [{"family": family, "pp": 2} for family in sorted(PIPELINE_TESTED_ALONE)]
    found = dict(zip(sorted(PIPELINE_TESTED_ALONE), in_world(2, parity, jobs), strict=True))
    assert {family: steps for family, steps in found.items() if max(steps) > 1e-5} == {}


def check_two_stages(family, **options):
    config = small_config("llama")
    config.model_type = family
    check_config(config, ParallelLayout(pp=2), StagePlan(pp=2), **options)


def test_a_family_that_is_unsupported_or_that_no_test_has_compared_is_refused():
    with pytest.raises(UsageError, match="gpt_neo"):
        check_two_stages("gpt_neo", checks_parity=True)
    check_two_stages("llama")
    with pytest.raises(UsageError, match=r"pp_size=2.*of_tomorrow.*check_parity=True"):
        check_two_stages("of_tomorrow")
    check_two_stages("of_tomorrow", checks_parity=True)


def test_code_of_the_user_is_no_tested_family_whatever_its_config_says():
    class OwnLlama(LlamaForCausalLM):
        pass

    check_two_stages("llama", model_class=LlamaForCausalLM)
    with pytest.raises(UsageError, match=r"llama \(OwnLlama\).*check_parity=True"):
        check_two_stages("llama", model_class=OwnLlama)


def structure_of(model):
    return trace_structure(model, ModelStructure.of(model))


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("mbart", ["model.decoder.embed_positions", "model.decoder.layernorm_embedding"], "model.decoder.layer_norm"),
        ("gpt2", ["transformer.wpe"], "transformer.ln_f"),
    ],
)
def test_modules_are_found_in_the_order_in_which_they_run(family, before, after):
    model = build_model(small_config(family), seed=5, dtype=torch.float32)
    random_state = torch.get_rng_state()
    found = structure_of(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    assert list(found.before) == before
    assert found.after == (after, "lm_head")


@pytest.mark.parametrize(
    ("family", "reason"),
    [("zamba", "their embeddings"), ("glm_moe_dsa", "hidden states only"), ("gpt_neo", "hidden states only")],
)
def test_models_whose_layers_exchange_more_than_hidden_states_are_refused(family, reason):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(family))
    with pytest.raises(UnsupportedModelError, match=rf"{reason}.*pp_size=1"):
        structure_of(model)


def test_layers_that_are_left_out_at_random_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config("opt", layerdrop=0.1))
    with pytest.raises(UnsupportedModelError, match=r"layerdrop is 0\.1"):
        structure_of(model)
