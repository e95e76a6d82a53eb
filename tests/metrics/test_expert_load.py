"""The load of the experts of a mixture: keys of each log, and a warning about experts without tokens."""

import json
import logging
from functools import partial

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from peft import LoraConfig, get_peft_model
from tiny import EXPERT_SIZES, EXPERTS, tiny_trainer
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainerState, set_seed

from hfscale import ScalingMetricsCallback
from hfscale.core.versions import enable_recomputation
from hfscale.metrics.expert_load import ExpertLoad, keys_of
from hfscale.trainer.expert_counter import counter_of

KEYS = {"moe/max_load", "moe/entropy", "moe/dropped_fraction"}
FAMILIES = {"mixtral": 2, "qwen3_moe": 2, "gpt_oss": 2, "deepseek_v3": 1, "glm4_moe": 1}
"""Families, and how many of the two layers have experts."""


def expert_model(family="mixtral"):
    set_seed(0)
    latent_attention = {"num_key_value_heads": 4} if family == "deepseek_v3" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(EXPERT_SIZES | latent_attention)))


class RouterChoices(TrainerCallback):
    """Counts what the routers of Mixtral return in training, independently of the modules of experts."""

    def __init__(self, model):
        self.counts = [torch.zeros(EXPERTS, dtype=torch.int64) for _ in model.model.layers]
        for layer, counts in zip(model.model.layers, self.counts, strict=True):
            layer.mlp.gate.register_forward_hook(lambda module, args, output, into=counts: self.add(output[2], into))

    def add(self, chosen, counts):
        if torch.is_grad_enabled():
            counts += torch.bincount(chosen.reshape(-1), minlength=EXPERTS)


def loads(trainer):
    return [{key: entry[key] for key in KEYS} for entry in trainer.state.log_history if set(entry) >= KEYS]


def test_the_keys_are_those_of_the_routers_choices(tmp_path):
    model = expert_model()
    choices = RouterChoices(model)
    trainer = tiny_trainer(
        tmp_path, ScalingMetricsCallback(), choices, model=model, logging_steps=4, eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    shares = [counts / counts.sum() for counts in choices.counts]
    (load,) = loads(trainer)
    assert load["moe/max_load"] == pytest.approx(max(float(s.max()) for s in shares) * EXPERTS)
    entropies = [float(-(s * s.log()).nansum() / np.log(EXPERTS)) for s in shares]
    assert load["moe/entropy"] == pytest.approx(min(entropies))
    assert load["moe/dropped_fraction"] == 0.0
    written = [json.loads(line) for line in (tmp_path / "scaling.jsonl").read_text().splitlines()]
    assert any(set(entry) >= KEYS for entry in written)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_each_family_are_found(tmp_path, family):
    model = expert_model(family)
    load = ExpertLoad(counter_of(tiny_trainer(tmp_path, model=model)))
    load.detach()
    assert len(load._layers) == FAMILIES[family]
    trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(), model=model, max_steps=2)
    trainer.train()
    assert len(loads(trainer)) == 2
    assert all(1.0 <= load["moe/max_load"] <= EXPERTS for load in loads(trainer))


def test_a_model_without_experts_has_no_such_keys(tmp_path):
    trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(), max_steps=1)
    trainer.train()
    assert not any(key.startswith("moe/") for entry in trainer.state.log_history for key in entry)


def test_nothing_stays_on_the_model_after_training(tmp_path):
    model = expert_model()
    tiny_trainer(tmp_path, ScalingMetricsCallback(), model=model, max_steps=1).train()
    assert not any(layer.mlp.experts._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.long
def test_compiled_layers_are_counted(tmp_path, recomputed):
    """Also where they are computed again in the backward pass, whose inputs must not change meanwhile."""
    trainers = []
    for name in ("plain", "compiled"):
        model = expert_model()
        if recomputed:
            enable_recomputation(model)
        if name == "compiled":
            for layer in model.model.layers:
                layer.compile(backend="eager")
        trainers.append(tiny_trainer(tmp_path / name, ScalingMetricsCallback(), model=model, max_steps=2))
        trainers[-1].train()
    assert loads(trainers[0]) == loads(trainers[1])


@pytest.mark.parametrize(
    ("tokens", "max_load", "entropy"),
    [([5, 5, 5, 5], 1.0, 1.0), ([20, 0, 0, 0], 4.0, 0.0), ([10, 10, 0, 0], 2.0, 0.5), ([7], 1.0, 1.0)],
)
def test_a_balanced_load_is_one_and_a_single_expert_has_no_entropy(tokens, max_load, entropy):
    keys = keys_of([np.array(tokens, dtype=float)], unassigned=0.0)
    assert keys == pytest.approx({"moe/max_load": max_load, "moe/entropy": entropy, "moe/dropped_fraction": 0.0})


def test_the_least_balanced_layer_counts():
    even = np.array([2.0, 2.0])
    uneven = np.array([4.0, 0.0])
    keys = keys_of([even, uneven, np.zeros(2)], unassigned=2.0)
    assert keys == pytest.approx({"moe/max_load": 2.0, "moe/entropy": 0.0, "moe/dropped_fraction": 0.2})
    assert keys_of([np.zeros(2)], unassigned=0.0) == {}


def choose(layer, chosen):
    """Let the router of a layer choose these experts, (tokens, choices)."""
    layer.mlp.experts.register_forward_pre_hook(lambda module, args: (args[0], chosen, args[2]))


def judge(load):
    """The metric keys that rank 0 computes at a log."""
    state = TrainerState(is_world_process_zero=True)
    numbers = {name: np.array([value]) for name, value in load.numbers(state, {}, {}).items()}
    return load.judge(numbers, state)


def test_experts_without_tokens_are_reported_once(tmp_path, caplog):
    model = expert_model().train()
    choose(model.model.layers[1], torch.tensor([[0, 1]]).expand(600, 2))
    load = ExpertLoad(counter_of(tiny_trainer(tmp_path, model=model)))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            model(input_ids=torch.randint(3, 60, (10, 60)))
            judge(load)
    (record,) = [record for record in caplog.records if "experts" in record.message]
    assert "2 of the 4 experts of model.layers.1.mlp.experts receive no tokens (2, 3)" in record.message
    assert "1200" in record.message  # 600 tokens x 2 choices / 4 experts, in four logs


def test_choices_that_name_no_expert_are_dropped_tokens(tmp_path):
    model = expert_model().train()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.forward = lambda hidden, chosen, weights: hidden  # which cannot compute them
        choose(layer, torch.tensor([[0, EXPERTS], [1, -1]]))
    load = ExpertLoad(counter_of(tiny_trainer(tmp_path, model=model)))
    model(input_ids=torch.ones(1, 2, dtype=torch.long))
    assert judge(load)["moe/dropped_fraction"] == 0.5


# -- padding ----------------------------------------------------------------------------------------------------------

LENGTHS = (5, 8, 3, 1)
TEXTS = [torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def padded(side):
    """The batch of all texts and its mask, padded on one side with another token."""
    rows = torch.full((len(TEXTS), max(LENGTHS)), 2)
    mask = torch.zeros_like(rows)
    for number, text in enumerate(TEXTS):
        span = slice(0, len(text)) if side == "right" else slice(max(LENGTHS) - len(text), None)
        rows[number, span] = text
        mask[number, span] = 1
    return {"input_ids": rows, "attention_mask": mask}


def packed():
    """All texts of several tokens in a row, filled up as `hfscale.recipe.packing` does: with texts of one token."""
    texts = TEXTS[:3]
    positions = torch.cat([*(torch.arange(len(text)) for text in texts), torch.zeros(8, dtype=torch.long)])
    return {"input_ids": torch.cat([*texts, torch.full((8,), 2)])[None], "position_ids": positions[None]}


def counts_of(folder, model, batches, *, call=None):
    """The counts of forward and backward passes in training, as one list per layer."""
    counter = counter_of(tiny_trainer(folder, model=model))
    for batch in batches:
        output = (call or model)(**batch)
        output[0].float().sum().backward()
    counter.detach()
    return [counts.tolist() for counts in counter.counts]


def adapted(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def recomputed(model, *, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def with_compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


MODELS = {
    "plain": lambda model: model,
    "adapters": adapted,
    "recomputed": partial(recomputed, reentrant=False),
    "recomputed with gradients only": partial(recomputed, reentrant=True),
    "compiled layers": with_compiled_layers,
    "compiled layers, recomputed": lambda model: with_compiled_layers(recomputed(model, reentrant=False)),
    "compiled": partial(torch.compile, backend="aot_eager"),
}


@pytest.mark.parametrize(
    ("side", "name"),
    [
        *(pytest.param("right", name, marks=[pytest.mark.long] if "compiled" in name else []) for name in MODELS),
        *(pytest.param("left", name, marks=[pytest.mark.faults] if "compiled" in name else []) for name in MODELS),
    ],
)
def test_padding_is_no_token_of_an_expert(tmp_path, name, side):
    """And a layer that is computed again counts once."""
    alone = counts_of(tmp_path, expert_model().train(), [{"input_ids": text[None]} for text in TEXTS])
    assert [sum(counts) for counts in alone] == [2 * sum(LENGTHS)] * 2
    assert counts_of(tmp_path, MODELS[name](expert_model()).train(), [padded(side)]) == alone


def test_padding_is_known_where_a_trainer_calls_the_model_without_its_head(tmp_path):
    alone = counts_of(tmp_path, expert_model().train(), [{"input_ids": text[None]} for text in TEXTS])
    model = expert_model().train()
    assert counts_of(tmp_path, model, [padded("right")], call=model.model) == alone


def test_the_padding_of_packed_texts_is_no_token_of_an_expert(tmp_path):
    alone = counts_of(tmp_path, expert_model().train(), [{"input_ids": text[None]} for text in TEXTS[:3]])
    assert counts_of(tmp_path, expert_model().train(), [packed()]) == alone


def test_labels_that_are_ignored_are_no_padding(tmp_path):
    batch = {"input_ids": TEXTS[1][None], "labels": torch.full((1, 8), -100)}
    batch["labels"][0, -1] = 3
    counts = counts_of(tmp_path, expert_model().train(), [batch])
    assert [sum(of_layer) for of_layer in counts] == [2 * 8] * 2


def test_forwards_without_gradients_and_those_that_fail_leave_nothing_behind(tmp_path):
    model = expert_model().train()
    counter = counter_of(tiny_trainer(tmp_path, model=model))
    with torch.no_grad():
        model(**padded("right"))
    with pytest.raises(IndexError):
        model(input_ids=torch.full((4, 8), 10_000), attention_mask=torch.zeros(4, 8))
    assert not any(counts.any() for counts in counter.counts)
    model(input_ids=TEXTS[1][None])
    assert [int(counts.sum()) for counts in counter.counts] == [2 * 8] * 2


def test_a_mask_that_does_not_tell_the_padding_is_reported_once(tmp_path, caplog):
    model = expert_model().train()
    load = ExpertLoad(counter_of(tiny_trainer(tmp_path, model=model)))
    batch = {"input_ids": TEXTS[1][None], "attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model(**batch)
            judge(load)
    (record,) = [record for record in caplog.records if "padding" in record.message]
    assert "experts: an attention mask of shape (1, 1, 8, 8) does not tell which tokens are padding" in record.message


@pytest.mark.long
def test_a_model_that_is_compiled_in_place_as_a_whole_is_reported_once(tmp_path, caplog):
    model = expert_model()
    trainer = tiny_trainer(tmp_path, ScalingMetricsCallback(), model=model, max_steps=3, logging_steps=1)
    model.compile(backend="eager")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (record,) = [record for record in caplog.records if "compiled in place" in record.message]
    assert record.message.startswith("experts: moe/max_load and moe/entropy are not logged: no token")
    assert loads(trainer) == []


def train_on_a_rank(folder):
    trainer = tiny_trainer(
        folder, ScalingMetricsCallback(), model=expert_model(), per_device_train_batch_size=2, logging_steps=4
    )
    trainer.train()
    if trainer.is_world_process_zero():
        (folder / "loads.json").write_text(json.dumps(loads(trainer)))


def test_the_tokens_of_all_ranks_count(tmp_path):
    assert run_ranks(2, train_on_a_rank, tmp_path, log=tmp_path / "log") == [0, 0]
    alone = tiny_trainer(tmp_path / "alone", ScalingMetricsCallback(), model=expert_model(), logging_steps=4)
    alone.train()
    assert json.loads((tmp_path / "loads.json").read_text()) == [pytest.approx(load) for load in loads(alone)]
