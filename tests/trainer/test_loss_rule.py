"""A loss that grows with the number of micro-batches is found when training begins."""

import pytest
import torch
from tiny import RandomTokens, logged, tiny_arguments, tiny_model
from transformers import BertConfig, BertForMaskedLM, Trainer

from hfscale import CommHealthCallback, LRScalingCallback
from hfscale.errors import UsageError

BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
TEXT = "BertForMaskedLM does not divide its loss by num_items_in_batch"


def bert(*, is_repaired=False):
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**BERT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    if is_repaired:
        model.accepts_loss_kwargs = False
    return model


def first_loss(folder, model, *callbacks, accumulation):
    """Train one step on eight rows."""
    batch = 8 // accumulation
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    args = tiny_arguments(folder, max_steps=1, **sizes)
    trainer = Trainer(model=model, args=args, train_dataset=RandomTokens(8), callbacks=list(callbacks))
    trainer.train()
    return logged(trainer, "loss")[0]


def test_the_loss_of_bert_grows_and_a_line_says_how_to_change_it(tmp_path, caplog):
    whole = first_loss(tmp_path, bert(), CommHealthCallback(), accumulation=1)
    assert TEXT not in caplog.text
    grown = first_loss(tmp_path, bert(), CommHealthCallback(), accumulation=4)
    assert grown == pytest.approx(4 * whole, rel=1e-4)
    assert f"{TEXT}, as Trainer expects: with 1 process and 4 micro-batches per step" in caplog.text
    caplog.clear()
    repaired = first_loss(tmp_path, bert(is_repaired=True), CommHealthCallback(), accumulation=4)
    assert repaired == pytest.approx(whole, rel=1e-4)
    assert TEXT not in caplog.text


def test_a_model_that_divides_by_the_count_gets_no_line(tmp_path, caplog):
    first_loss(tmp_path, tiny_model(), CommHealthCallback(), accumulation=4)
    assert "does not divide its loss" not in caplog.text


def test_the_learning_rate_is_not_scaled_for_such_a_loss(tmp_path):
    scaling = LRScalingCallback(base_global_batch_size=2)
    with pytest.raises(UsageError, match=TEXT):
        first_loss(tmp_path, bert(), scaling, accumulation=4)
    first_loss(tmp_path, bert(), scaling, accumulation=1)
