"""The bias of routers moves towards an even load of the experts: `--router_bias_update_rate`."""

import json
import os
import shutil

import pytest
import torch
from forked_ranks import run_ranks
from recipe_runs import environment_of, logged, output, run_recipe, vocabulary_of
from safetensors.torch import load_file
from tiny import EXPERT_SIZES, EXPERTS, VOCAB, tiny_trainer
from tiny import logged as logged_by
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, set_seed

from hfscale.errors import UsageError
from hfscale.recipe.router_bias import BIAS, RouterBiasCallback, biased_routers, check_has_bias, update_bias
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

RATE = 0.01
SIZES = EXPERT_SIZES | {"num_hidden_layers": 3, "num_key_value_heads": 4, "n_shared_experts": 1}
FAMILIES = {"deepseek_v3": 2, "glm4_moe": 2, "minimax_m2": 3, "qwen3_moe": 0, "mixtral": 0}
"""Families, and how many of the three layers have a router with a bias."""


def config_of(family="deepseek_v3", **changes):
    return AutoConfig.for_model(family, **(SIZES | changes))


def biases(model):
    return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith(BIAS)]


class Choices(TrainerCallback):
    """Computes the bias from what the routers return in each step, independently of the counter."""

    def __init__(self, model):
        self.routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        self.expected = [torch.zeros(EXPERTS) for _ in self.routers]
        self.chosen = [[] for _ in self.routers]
        for router, chosen in zip(self.routers, self.chosen, strict=True):
            router.register_forward_hook(lambda module, args, output, into=chosen: self.add(module, output[2], into))

    def add(self, module, choices, into):
        if module.training and torch.is_grad_enabled():
            into.append(choices.flatten())

    def on_step_end(self, args, state, control, **kwargs):
        for bias, chosen in zip(self.expected, self.chosen, strict=True):
            tokens = torch.bincount(torch.cat(chosen), minlength=EXPERTS).double()
            bias += RATE * (tokens.mean() - tokens).sign().float()
            chosen.clear()


def train(folder, *, model=None, rate=RATE, learning_rate=1e-2, **arguments):
    """Train in this process; return the trainer and what the bias should be."""
    if model is None:
        set_seed(0)
        model = AutoModelForCausalLM.from_config(config_of())
    choices = Choices(model)
    trainer = tiny_trainer(folder, choices, model=model, learning_rate=learning_rate, **arguments)
    trainer.add_callback(RouterBiasCallback(trainer, rate))
    trainer.train()
    return trainer, choices.expected


def test_the_bias_of_an_expert_with_few_tokens_grows():
    bias = torch.tensor([0.5, 0.0, 0.0, 0.0])
    update_bias(bias, torch.tensor([7, 1, 4, 4]), 0.25)
    assert bias.tolist() == [0.25, 0.25, 0.0, 0.0]  # the last two have the average
    update_bias(bias, torch.tensor([1, 1, 0, 1]), 0.25)
    assert bias.tolist() == [0.0, 0.0, 0.25, -0.25]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_and_without_a_bias(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family))
    assert len(biased_routers(model)) == FAMILIES[family]
    if FAMILIES[family]:
        check_has_bias(config_of(family), RATE)
    else:
        with pytest.raises(UsageError, match=f"--router_bias_update_rate 0.01: the routers of {family} have no bias"):
            check_has_bias(config_of(family), RATE)
        check_has_bias(config_of(family), 0.0)


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_bias_follows_the_choices_of_all_micro_batches(tmp_path, accumulated, recomputed):
    """Evaluations do not count, and layers that are computed again do not change the direction."""
    arguments = {"gradient_checkpointing": True} if recomputed else {}
    trainer, expected = train(
        tmp_path,
        max_steps=4,
        gradient_accumulation_steps=accumulated,
        eval_strategy="steps",
        eval_steps=1,
        **arguments,
    )
    found = biases(trainer.model)
    assert len(found) == 2
    for bias, own in zip(found, expected, strict=True):
        assert bias.abs().max() > 0
        torch.testing.assert_close(bias, own, rtol=0, atol=1e-6)
    assert not any(layer.mlp.experts._forward_pre_hooks for layer in trainer.model.model.layers[1:])


def test_the_load_becomes_more_even(tmp_path):
    """Of a router that prefers two of the four experts."""
    loads = {}
    for rate in (0.0, 0.005):
        set_seed(0)
        model = AutoModelForCausalLM.from_config(config_of())
        for router in biased_routers(model).values():
            getattr(router, BIAS)[2:] -= 0.1
        trainer, _ = train(tmp_path / str(rate), model=model, rate=rate, learning_rate=1e-4, max_steps=16)
        seen = []
        for router in biased_routers(trainer.model).values():
            router.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output[2].flatten()))
        trainer.evaluate()
        counts = [torch.bincount(chosen, minlength=EXPERTS) for chosen in seen]
        loads[rate] = max(float(tokens.max() / tokens.sum()) * EXPERTS for tokens in counts)
    assert loads[0.0] == 2.0
    assert loads[0.005] < 1.6


def test_a_bias_of_low_precision_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(config_of()).bfloat16()
    with pytest.raises(UsageError, match=r"model.layers.1.mlp.experts is in torch.bfloat16"):
        train(tmp_path, model=model, max_steps=1)


def train_on_a_rank(folder):
    trainer, _ = train(folder, per_device_train_batch_size=2, max_steps=4)
    if trainer.is_world_process_zero():
        (folder / "biases.json").write_text(json.dumps([bias.tolist() for bias in biases(trainer.model)]))


def test_the_tokens_of_all_ranks_count(tmp_path):
    assert run_ranks(2, train_on_a_rank, tmp_path, log=tmp_path / "log") == [0, 0]
    alone, _ = train(tmp_path / "alone", max_steps=4, per_device_train_batch_size=4)
    assert json.loads((tmp_path / "biases.json").read_text()) == [bias.tolist() for bias in biases(alone.model)]


class Ragged(Dataset):
    """Texts of 4 to 10 tokens."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        length = 4 + index % 7
        ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def collate(rows):
    """Pad rows on the right."""
    length = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": torch.full((len(rows), length), 2), "labels": torch.full((len(rows), length), -100)}
    batch["attention_mask"] = torch.zeros_like(batch["labels"])
    for number, row in enumerate(rows):
        batch["input_ids"][number, : len(row["input_ids"])] = row["input_ids"]
        batch["labels"][number, : len(row["input_ids"])] = row["labels"]
        batch["attention_mask"][number, : len(row["input_ids"])] = 1
    return batch


def train_on_texts(folder, **arguments):
    """Train on texts of different lengths, four in each step; return the losses and the biases."""
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config_of())
    trainer = tiny_trainer(folder, model=model, learning_rate=1e-3, optim="sgd", **arguments)
    trainer.train_dataset = Ragged()
    trainer.data_collator = collate
    trainer.add_callback(RouterBiasCallback(trainer, RATE))
    trainer.train()
    gathered = [getattr(bias, "full_tensor", lambda bias=bias: bias)() for bias in biases(trainer.model)]
    return {"loss": logged_by(trainer, "loss"), "biases": [bias.tolist() for bias in gathered]}


def train_on_texts_on_a_rank(folder):
    if "ACCELERATE_USE_FSDP" in os.environ:
        let_fsdp_run_on_cpu()
    result = train_on_texts(folder, per_device_train_batch_size=2)
    if os.environ["RANK"] == "0":
        (folder / "result.json").write_text(json.dumps(result))


def assert_same_texts(found, expected):
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert found["biases"] == [pytest.approx(bias, abs=1e-6) for bias in expected["biases"]]


@pytest.mark.parametrize("recomputed", [False, True])
def test_padding_does_not_move_the_bias(tmp_path, recomputed):
    alone = train_on_texts(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert all(max(map(abs, bias)) > 0.99 * RATE for bias in alone["biases"])
    for batch in (2, 4):
        arguments = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
        assert_same_texts(train_on_texts(tmp_path, gradient_checkpointing=recomputed, **arguments), alone)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_padding_does_not_move_the_bias_on_two_ranks(tmp_path, strategy):
    alone = train_on_texts(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    env = environment_of(strategy)
    assert run_ranks(2, train_on_texts_on_a_rank, tmp_path, log=tmp_path / "log", env=env) == [0, 0]
    assert_same_texts(json.loads((tmp_path / "result.json").read_text()), alone)


@pytest.mark.long
def test_a_model_that_is_compiled_in_place_as_a_whole_is_refused(tmp_path):
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config_of())
    trainer = tiny_trainer(tmp_path, model=model)
    trainer.add_callback(RouterBiasCallback(trainer, RATE))
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="no token of the experts was counted, as where the model is compiled"):
        trainer.train()


def test_a_mask_that_does_not_tell_the_padding_is_refused(tmp_path):
    def with_full_masks(rows):
        batch = collate(rows)
        length = batch["input_ids"].shape[1]
        batch["attention_mask"] = torch.ones(len(rows), 1, length, length, dtype=torch.bool).tril()
        return batch

    set_seed(0)
    trainer = tiny_trainer(tmp_path, model=AutoModelForCausalLM.from_config(config_of()))
    trainer.train_dataset = Ragged()
    trainer.data_collator = with_full_masks
    trainer.add_callback(RouterBiasCallback(trainer, RATE))
    message = r"--router_bias_update_rate 0.01: an attention mask of shape \(4, 1, \d+, \d+\) does not tell"
    with pytest.raises(UsageError, match=message):
        trainer.train()


# -- the recipes ------------------------------------------------------------------------------------------------------

FLAGS = ("--config_name", "deepseek_v3", "--router_bias_update_rate", str(RATE), "--save_steps", "3")
NATIVE = ("--ep_size", "2")


@pytest.fixture(scope="module")
def workplace(workplace):
    """The folder, with the config of a small DeepSeek-V3."""
    config_of(vocab_size=vocabulary_of(workplace)).save_pretrained(workplace / "deepseek_v3")
    return workplace


@pytest.fixture(scope="module")
def single(workplace, tmp_path_factory):
    """The folder of a run on one process, with which the others are compared."""
    folder = shutil.copytree(workplace, tmp_path_factory.mktemp("single"), dirs_exist_ok=True)
    run_recipe(folder, "single", 1, *FLAGS)
    return folder


def exported_biases(folder):
    weights = load_file(folder / "out" / "model.safetensors")
    return {name: bias for name, bias in weights.items() if name.endswith(BIAS)}


def assert_same_run(folder, single):
    assert logged(folder, "loss") == pytest.approx(logged(single, "loss"), abs=1e-5)
    expected = exported_biases(single)
    assert len(expected) == 2
    assert all(bias.abs().max() > RATE for bias in expected.values())
    found = exported_biases(folder)
    assert found.keys() == expected.keys()
    for name, bias in found.items():
        torch.testing.assert_close(bias, expected[name], rtol=0, atol=1e-6)


@pytest.mark.recipes
@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("strategy", "ranks", "flags"),
    [("single", 1, ()), ("ddp", 2, ()), ("fsdp2", 2, ()), ("native", 2, NATIVE), ("zero3", 2, ())],
    ids=["single", "ddp", "fsdp2", "native", "zero3"],
)
def test_a_strategy_trains_and_resumes_like_one_process(workplace, single, tmp_path, strategy, ranks, flags):
    """Killed after step 3 and started again: the bias continues from the checkpoint."""
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    run_recipe(folder, strategy, ranks, *FLAGS, *flags)
    assert "router bias: moves by 0.01 towards an even load after each step, in 2 layers" in output(folder)
    assert_same_run(folder, single)
    shutil.rmtree(folder / "out" / "checkpoint-6")
    (folder / "out" / "all_results.json").unlink()
    run_recipe(folder, strategy, ranks, *FLAGS, *flags)
    assert "continues from checkpoint-3" in output(folder)
    assert_same_run(folder, single)


@pytest.mark.recipes
@pytest.mark.world(2)
def test_a_native_run_continues_on_one_process(workplace, single, tmp_path):
    """The converted checkpoint has the bias."""
    folder = shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    run_recipe(folder, "native", 2, *FLAGS, *NATIVE)
    shutil.rmtree(folder / "out" / "checkpoint-6")
    (folder / "out" / "all_results.json").unlink()
    run_recipe(folder, "single", 1, *FLAGS)
    assert_same_run(folder, single)
