"""The load of the experts of a mixture: keys of each log, and a warning about experts without tokens."""

import json
import logging

import numpy as np
import pytest
import torch
from forked_ranks import run_ranks
from tiny import EXPERT_SIZES, EXPERTS, tiny_trainer
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, set_seed

from hfscale import ScalingMetricsCallback
from hfscale.core.versions import enable_recomputation
from hfscale.metrics.expert_load import ExpertLoad, keys_of
from hfscale.trainer.expert_counter import ExpertCounter

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
    load = ExpertLoad(ExpertCounter(model, torch.device("cpu")))
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


def test_experts_without_tokens_are_reported_once(tmp_path, caplog):
    model = expert_model()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[3] = 0.0
        model.model.layers[1].mlp.gate.weight[:3] *= 1000.0  # of four logits two are at least 0, none of them expert 3
    hidden = torch.ones(600, 32)
    load = ExpertLoad(ExpertCounter(model, torch.device("cpu")))
    experts = model.model.layers[1].mlp.experts.train()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            experts(hidden, torch.tensor([[0, 1]]).expand(600, 2), torch.ones(600, 2))
            numbers = {name: np.array([value]) for name, value in load.numbers(None, {}, {}).items()}
            load.judge(numbers, None)
    (record,) = [record for record in caplog.records if "experts" in record.message]
    assert "2 of the 4 experts of model.layers.1.mlp.experts receive no tokens (2, 3)" in record.message
    assert "1200" in record.message  # 600 tokens x 2 choices / 4 experts, in four logs


def test_choices_that_name_no_expert_are_dropped_tokens():
    model = expert_model()
    load = ExpertLoad(ExpertCounter(model, torch.device("cpu")))
    hook = next(iter(model.model.layers[0].mlp.experts._forward_pre_hooks.values()))
    hook(model.model.layers[0].mlp.experts.train(), (None, torch.tensor([[0, EXPERTS], [1, -1]]), None), {})
    numbers = {name: np.array([value]) for name, value in load.numbers(None, {}, {}).items()}
    assert load.judge(numbers, None)["moe/dropped_fraction"] == 0.5


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
