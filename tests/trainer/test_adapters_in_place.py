"""Adapters in bfloat16 stay the parameters that they are where a checkpoint of them is loaded."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import RandomTokens, StopAt, logged, tiny_arguments, tiny_model
from transformers import Trainer

from hfscale import SpotCheckpointCallback, latest_checkpoint

OPTIONS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "logging_steps": 1, "learning_rate": 0.02}
BEST = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}


def train(folder, *callbacks, own_optimizer, **options):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_model().bfloat16(), config, autocast_adapter_dtype=False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    trainer = Trainer(
        model,
        tiny_arguments(folder, **(OPTIONS | options)),
        train_dataset=RandomTokens(),
        eval_dataset=RandomTokens(4),
        optimizers=(optimizer if own_optimizer else None, None),
        callbacks=[SpotCheckpointCallback(), *callbacks],
    )
    trainer.train(resume_from_checkpoint=latest_checkpoint(folder))
    return trainer


@pytest.mark.parametrize("own_optimizer", [False, True])
def test_a_resumed_run_trains_the_same_adapters_in_the_same_data_type(tmp_path, own_optimizer):
    whole = train(tmp_path / "whole", own_optimizer=own_optimizer)
    train(tmp_path / "run", StopAt(3), own_optimizer=own_optimizer)
    again = train(tmp_path / "run", own_optimizer=own_optimizer)
    assert logged(again, "loss") == logged(whole, "loss")
    weights = dict(whole.model.named_parameters())
    for name, weight in again.model.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, weights[name])


def test_the_best_model_has_the_data_type_that_was_trained(tmp_path):
    best = train(tmp_path, own_optimizer=False, **BEST)
    assert {weight.dtype for weight in best.model.parameters()} == {torch.bfloat16}
