"""μTransfer: initial values and groups by hand, what is refused, an exact resume, and every strategy."""

import json
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from growing_runs import FSDP, zero
from recipe_runs import logged as logged_by_recipe
from recipe_runs import make_workplace, run_recipe
from tiny import RandomTokens, StopAt, logged, tiny_arguments, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, default_data_collator, set_seed

from hfscale import LRScalingCallback, ScalingCallback, initialize_at_width
from hfscale.errors import UsageError
from hfscale.facts.support import Combination, rules, why_not
from hfscale.lr_scaling.width_rules import width_rules
from hfscale.trainer.strategies.fsdp2 import let_fsdp_run_on_cpu

WIDTH, BASE = 64, 16
SIZES = {"hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
SMALL = SIZES | {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def make_model(family, **sizes):
    options = SMALL | sizes
    if family in ("gpt2", "phi"):
        del options["head_dim"]
    set_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))


def wide_llama():
    model = tiny_model(**SIZES)
    initialize_at_width(model, base_width=BASE)
    return model


def make_trainer(folder, *callbacks, model=None, base_width=BASE, **arguments):
    own = ScalingCallback(lr_scaling=LRScalingCallback(base_width=base_width))
    args = {"max_steps": 5, "learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    args = tiny_arguments(folder, **(args | arguments))
    if "ACCELERATE_USE_FSDP" in os.environ:
        let_fsdp_run_on_cpu()
    return Trainer(
        model=wide_llama() if model is None else model,
        args=args,
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[own, *callbacks],
    )


def test_initial_values_and_groups_of_a_llama_are_those_of_the_table(tmp_path):
    plain = dict(tiny_model(**SIZES).named_parameters())
    model = wide_llama()
    m = WIDTH / BASE
    factors = {}
    for name, parameter in model.named_parameters():
        is_hidden = parameter.dim() == 2 and "embed" not in name and "lm_head" not in name
        factors[name] = m**-0.5 if is_hidden else 1 / m if name == "lm_head.weight" else 1.0
        assert torch.equal(parameter, plain[name] * factors[name]), name
    trainer = make_trainer(tmp_path, model=model, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(parameter)]: (group["initial_lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
        for parameter in group["params"]
    }
    for name, factor in factors.items():
        decay = 0.0 if "norm" in name else 0.1
        assert found[name] == pytest.approx((1e-2, decay) if factor == 1 else (1e-2 / m, decay * m)), name
    assert logged(trainer, "learning_rate")[0] == pytest.approx(1e-2)
    assert json.loads((tmp_path / "checkpoint-1" / "config.json").read_text())["hfscale_base_width"] == BASE


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "gpt2",
            {
                "transformer.h.1.attn.c_attn.weight": ("hidden", 1 / 2, 1 / 4),
                "transformer.h.1.attn.c_attn.bias": ("vector", 1, 1),
                "transformer.wte.weight": ("vector", 1, 1),
                "transformer.ln_f.weight": ("vector", 1 / 4, 1 / 4),  # the head is tied
                "transformer.ln_f.bias": ("vector", 1 / 4, 1 / 4),
            },
        ),
        (
            "gemma3_text",
            {
                "model.embed_tokens.weight": ("vector", 1 / 2, 1 / 2),  # it is multiplied by the root of the width
                "model.norm.weight": ("vector", 1 / 2, 1 / 2),
                "model.layers.1.self_attn.q_norm.weight": ("scalar", 1, 1),
                "model.layers.1.mlp.down_proj.weight": ("hidden", 1 / 2, 1 / 4),
            },
        ),
        (
            "qwen3_moe",
            {
                "model.layers.1.mlp.experts.gate_up_proj": ("hidden", 1 / 2, 1 / 4),
                "model.layers.1.mlp.gate.weight": ("output", 1 / 4, 1 / 4),
                "lm_head.weight": ("output", 1 / 4, 1 / 4),
            },
        ),
        ("gpt_oss", {"model.layers.1.mlp.experts.down_proj_bias": ("vector", 1, 1)}),
    ],
)
def test_roles_and_factors_follow_from_modules_and_shapes(family, expected):
    found = width_rules(make_model(family), BASE)
    for name, rule in expected.items():
        assert (found[name].role, found[name].initial, found[name].rate) == pytest.approx(rule), name
    assert found.get("model.norm.weight") is None or found["model.norm.weight"].adds_one == (family == "gemma3_text")


def test_the_factor_on_a_tied_head_multiplies_the_logits():
    """Of models that differ in the norm before the head alone, for a norm that multiplies by 1 + its weight."""
    model = make_model("gemma3_text")
    inputs = torch.arange(8).view(1, -1)
    rule = width_rules(model, BASE)["model.norm.weight"]
    with torch.no_grad():
        before = model(inputs).logits
        weight = model.model.norm.weight
        weight.copy_((1 + weight) * rule.initial - 1)
        assert torch.allclose(model(inputs).logits, before * rule.initial, rtol=1e-5, atol=1e-7)


def trained():
    model = tiny_model(**SIZES)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    return model


def other_draw():
    model = tiny_model(**SIZES)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    return model


@pytest.mark.parametrize(
    ("make", "width", "message"),
    [
        (wide_llama, BASE, "notes a base width of 16"),
        (trained, BASE, "model.norm.weight is not 1 everywhere"),
        (other_draw, BASE, "up_proj.weight has a standard deviation of"),
        (lambda: tiny_model(**SIZES), 24, "base_width is 24: it must be a multiple of 16 up to 64"),
        (lambda: tiny_model(**SIZES), 128, "base_width is 128: it must be a multiple of 16 up to 64"),
        (lambda: make_model("mamba"), BASE, "mamba"),
        (lambda: make_model("deepseek_v3"), BASE, "it is not known how"),
        (lambda: torch.nn.Linear(2, 2), BASE, "not a causal language model"),
    ],
)
def test_models_that_cannot_be_initialised_are_refused(make, width, message):
    with pytest.raises(UsageError, match=message):
        initialize_at_width(make(), base_width=width)


def test_a_loaded_model_is_refused_also_if_its_values_are_initial(tmp_path):
    tiny_model(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="loaded from a checkpoint"):
        initialize_at_width(AutoModelForCausalLM.from_pretrained(tmp_path), base_width=BASE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": tiny_model(**SIZES)}, "base_width=16: the model was initialised for no width"),
        ({"base_width": 32}, "base_width=32: the model was initialised for 16"),
        ({"optim": "adafactor"}, "with the optimizer adafactor"),
        ({"lr_scheduler_type": "constant", "optimizers": "given"}, "a new optimizer and no scheduler"),
    ],
)
def test_trainings_whose_rates_would_not_follow_are_refused(tmp_path, options, message):
    given = options.pop("optimizers", None)
    trainer = make_trainer(tmp_path, **options)
    if given:
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
        trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
    with pytest.raises(UsageError, match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_callback_that_comes_too_late_is_refused(tmp_path):
    trainer = Trainer(
        model=wide_llama(),
        args=tiny_arguments(tmp_path),
        train_dataset=RandomTokens(),
        data_collator=default_data_collator,
    )
    trainer.create_optimizer()
    trainer.create_optimizer = None

    class Late(LRScalingCallback):
        def before_train(self, adapter):
            self._begin_run()

    trainer.add_callback(Late(base_width=BASE))
    trainer.create_optimizer = lambda *args: trainer.optimizer
    with pytest.raises(UsageError, match="base_width"):
        trainer.train()


def test_every_rule_about_the_base_width_says_what_to_do():
    known = [rule for rule in rules() if "base_width" in rule.when]
    assert len(known) == 8
    wide = Combination(base_width=64, engine="trainer", strategy="fsdp2", optimizer="adamw_torch", method="full")
    assert why_not(wide) is None
    for change in (
        {"engine": "parallel_trainer"},
        {"tp": 2},
        {"strategy": "native"},
        {"deepspeed_optimizer": "Adam"},
        {"strategy": "zero2", "offload": "optimizer"},
        {"optimizer": "lion_32bit"},
        {"method": "lora"},
        {"islands": 2},
    ):
        assert "base_width" in why_not(replace(wide, **change), "base_width")


def losses_of(trainer):
    return logged(trainer, "loss")[: trainer.state.global_step]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("one"))
    trainer.train()
    return losses_of(trainer)


def test_a_resumed_training_equals_the_uninterrupted_one(tmp_path, reference):
    make_trainer(tmp_path, StopAt(2)).train()
    resumed = make_trainer(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses_of(resumed) == reference
    plain = make_trainer(tmp_path, base_width=None, model=tiny_model(**SIZES))
    with pytest.raises(UsageError, match=r"base_width=None: .* was trained with base_width=16"):
        plain.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp", "zero1", "zero2", "zero3"))]
)
def test_every_strategy_equals_one_process(tmp_path, reference, strategy):
    env = FSDP if strategy == "fsdp2" else {}
    codes = run_ranks(2, rank, tmp_path, strategy, log=tmp_path / "log", env=env)
    assert codes == [0, 0], "\n".join(path.read_text()[-3000:] for path in (tmp_path / "log").glob("*.log"))
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(reference, rel=1e-6)


def rank(folder, strategy):
    options = {"deepspeed": zero(int(strategy[-1]))} if strategy.startswith("zero") else {}
    trainer = make_trainer(folder, per_device_train_batch_size=2, **options)
    trainer.train()
    if os.environ["RANK"] == "0":
        (folder / "losses.json").write_text(json.dumps(losses_of(trainer)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.world(2)
@pytest.mark.recipes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_recipe_trains_a_new_model_for_a_base_width(tmp_path, strategy):
    """`deep` has width 32: its hidden matrices begin with half of the variance, and have half of the rate."""
    width = ("--base_width", "16", "--max_steps", "2")
    run_recipe(make_workplace(tmp_path / "with"), strategy, 2, "--config_name", "deep", *width)
    run_recipe(make_workplace(tmp_path / "without"), strategy, 2, "--config_name", "deep", *width[2:])
    config = json.loads((tmp_path / "with" / "out" / "config.json").read_text())
    assert config["hfscale_base_width"] == 16
    assert logged_by_recipe(tmp_path / "with", "loss") != logged_by_recipe(tmp_path / "without", "loss")
