"""Settings that a callback changes once, at a step, are those of the run after a resume; what it replaces is named."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import RandomTokens, byte_level_tokenizer, logged, tiny_arguments, tiny_model
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.program_state.kept_values import KeptValues
from hfscale.checkpoint.program_state.objects import Holder
from hfscale.checkpoint.program_state.settings import parts_of, replaced, settings_of

ROWS, BATCH = 32, 4
CHANGED, CRASH = 2, 5


class Once(TrainerCallback):
    """Freezes at the start of each launch what `begin` freezes, and changes something at one step."""

    trainer = None

    def __init__(self, change, begin, crash):
        self.change, self.begin, self.crash = change, begin, crash

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin(self.trainer)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == CHANGED:
            self.change(self.trainer)
        if state.global_step == self.crash:
            raise RuntimeError("planned")


class WithTemperature(Trainer):
    """As a Trainer of TRL: `temperature` is an attribute that the library's class assigns."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = 1.0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.loss / self.temperature
        return (loss, outputs) if return_outputs else loss


WithTemperature.__module__ = "trl.trainer.with_temperature"


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=320, hidden_dropout_prob=0.1, **sizes))


def llama_with_adapters():
    return get_peft_model(tiny_model(), LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"]))


def masking():
    tokenizer = byte_level_tokenizer(["a b c"])
    tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2)


def train_weights(module, trains):
    for parameter in module.parameters():
        parameter.requires_grad_(trains)


def set_dropout(trainer):
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5


def set_scaling(trainer):
    for module in trainer.model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] = 5.0


CHANGES = {
    "layers that begin to train": (
        {"begin": lambda trainer: train_weights(trainer.model.model, trains=False)},
        lambda trainer: train_weights(trainer.model.model.layers[1], trains=True),
    ),
    "embeddings that no longer train": (
        {},
        lambda trainer: train_weights(trainer.model.model.embed_tokens, trains=False),
    ),
    "dropout": ({"model": bert}, set_dropout),
    "a number of a norm": ({}, lambda trainer: setattr(trainer.model.model.norm, "variance_epsilon", 0.3)),
    "the factor of adapters": ({"model": llama_with_adapters}, set_scaling),
    "masks of a collator": (
        {"model": bert, "data_collator": masking},
        lambda trainer: setattr(trainer.data_collator, "mlm_probability", 0.6),
    ),
    "label smoothing": (
        {"label_smoothing_factor": 0.1},
        lambda trainer: setattr(trainer.label_smoother, "epsilon", 0.5),
    ),
    "clipping": ({}, lambda trainer: setattr(trainer.args, "max_grad_norm", 0.01)),
    "a factor of a library's Trainer": (
        {"kind": WithTemperature},
        lambda trainer: setattr(trainer, "temperature", 3.0),
    ),
}


def program(
    folder,
    change,
    crash=None,
    *,
    kind=Trainer,
    model=tiny_model,
    begin=lambda trainer: None,
    data_collator=None,
    **more,
):
    once = Once(change, begin, crash)
    arguments = tiny_arguments(
        folder,
        max_steps=ROWS // BATCH,
        save_strategy="steps",
        save_steps=1,
        logging_steps=1,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        **more,
    )
    trainer = kind(
        model=model(),
        args=arguments,
        train_dataset=RandomTokens(ROWS),
        data_collator=data_collator() if data_collator else default_data_collator,
        callbacks=[SpotCheckpointCallback(asynchronous=False), once],
    )
    once.trainer = trainer
    return trainer


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_a_callback_has_changed_is_restored(tmp_path, name):
    options, change = CHANGES[name]
    whole = program(tmp_path / "whole", change, **options)
    whole.train()
    unchanged = program(tmp_path / "unchanged", lambda trainer: None, **options)
    unchanged.train()
    assert logged(whole, "loss")[CHANGED + 2 :] != logged(unchanged, "loss")[CHANGED + 2 :]
    crashed = tmp_path / "crashed"
    with pytest.raises(RuntimeError, match="planned"):
        program(crashed, change, CRASH, **options).train()
    again = program(crashed, change, **options)
    again.train(resume_from_checkpoint=latest_checkpoint(crashed))
    assert logged(again, "loss") == logged(whole, "loss")


def other_loss(outputs, labels, num_items_in_batch=None):
    return outputs.logits.square().mean()


def add_hook(trainer):
    trainer.model.model.norm.register_forward_hook(lambda module, inputs, output: output * 2)


def replace_module(trainer):
    trainer.model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def replace_method(trainer):
    """Keep a module in evaluation mode."""
    module = trainer.model.model.norm
    module.train = lambda mode=True: module


REPLACED = {
    "trainer.compute_loss_func": lambda trainer: setattr(trainer, "compute_loss_func", other_loss),
    "trainer.data_collator": lambda trainer: setattr(trainer, "data_collator", masking()),
    "hooks of model.model.norm": add_hook,
    "model.model.layers.0.mlp.act_fn": replace_module,
    "model.model.norm.train": replace_method,
}


@pytest.mark.parametrize("path", REPLACED)
def test_what_a_callback_replaces_is_named_once(tmp_path, log, path):
    program(tmp_path, REPLACED[path]).train()
    (line,) = [line for line in log.messages if "has replaced this" in line]
    assert line.startswith(f"{path}: ")


def test_nothing_is_said_of_a_training_that_replaces_nothing(tmp_path, log):
    program(tmp_path, lambda trainer: None, model=llama_with_adapters).train()
    assert not [line for line in log.messages if "has replaced this" in line]


def test_another_adapter_is_a_part():
    model = llama_with_adapters()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = Trainer(model=model, args=tiny_arguments("none"), train_dataset=RandomTokens(4))
    before = parts_of(trainer, model)
    model.set_adapter("other")
    assert replaced(before, parts_of(trainer, model)) == ["the active adapter"]


def test_sums_of_trainer_itself_are_no_settings(tmp_path):
    trainer = program(tmp_path, lambda trainer: None)
    trainer.train()
    assert isinstance(trainer._total_loss_scalar, float)
    places = settings_of(trainer, trainer.model)
    assert not places["trainer.settings"].read()
    assert places["model.settings"].read()["model.norm.weight.requires_grad"] is True


def test_a_setting_of_a_module_that_is_gone_is_left_alone(tmp_path):
    trainer = program(tmp_path, lambda trainer: None)
    place = settings_of(trainer, trainer.model)["model.settings"]
    place.read()
    place.write("model.gone.p", 0.5)
    place.write("model.norm.variance_epsilon", 0.25)
    assert trainer.model.model.norm.variance_epsilon == 0.25


def test_many_settings_are_restored_with_one_search_of_the_model(tmp_path):
    trainer = program(tmp_path, lambda trainer: None)
    place = settings_of(trainer, trainer.model)["model.settings"]
    reads = []
    counted = Holder(lambda: reads.append(1) or place.read(), place.write)
    values = KeptValues({"model.settings": counted})
    train_weights(trainer.model, trains=False)
    saved = values.changed()
    assert len(saved["model.settings"]) == len(list(trainer.model.parameters()))
    train_weights(trainer.model, trains=True)
    reads.clear()
    values.restore(saved)
    assert len(reads) == 1
    assert not any(parameter.requires_grad for parameter in trainer.model.parameters())
