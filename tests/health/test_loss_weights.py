"""A warning where Trainer averages the means of micro-batches, and the loss of docs/own_trainer.md that does not."""

import re
import runpy

import pytest
from conftest import REPOSITORY
from tiny import RandomTokens, logged, tiny_arguments, tiny_model
from transformers import LlamaForCausalLM, Trainer, default_data_collator

from hfscale import CommHealthCallback
from hfscale.health.loss_weights import why_tokens_weigh_unequally


class RefusingForCausalLM(LlamaForCausalLM):
    """A language model as many image-text models are: Trainer does not tell it the tokens of a step."""

    accepts_loss_kwargs = False


class RaggedTokens(RandomTokens):
    """Sequences of which the second half trains fewer tokens each time."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        labels = row["labels"].clone()
        labels[: index % 13] = -100
        return {"input_ids": row["input_ids"], "labels": labels}


class OwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def refusing():
    plain = tiny_model()
    model = RefusingForCausalLM(plain.config)
    model.load_state_dict(plain.state_dict())
    return model


def documented_loss(folder):
    """The function that docs/own_trainer.md shows."""
    text = (REPOSITORY / "docs" / "own_trainer.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = folder / "shown.py"
    path.write_text(next(block for block in blocks if "def loss_of_tokens" in block))
    return runpy.run_path(str(path))["loss_of_tokens"]


def make_trainer(folder, model, kind=Trainer, options=None, **arguments):
    return kind(
        model=model,
        args=tiny_arguments(folder, per_device_train_batch_size=2, max_steps=3, **arguments),
        train_dataset=RaggedTokens(),
        data_collator=default_data_collator,
        callbacks=[CommHealthCallback()],
        **(options or {}),
    )


def losses(*args, **kwargs):
    trainer = make_trainer(*args, gradient_accumulation_steps=4, **kwargs)
    trainer.train()
    return logged(trainer, "loss")


def test_a_mean_of_means_is_said_and_the_documented_loss_weighs_all_tokens_equally(tmp_path, log):
    expected = losses(tmp_path / "plain", tiny_model())
    assert "average the means" not in log.text
    means = losses(tmp_path / "means", refusing())
    (line,) = [line for line in log.messages if "average the means" in line]
    assert line.startswith("RefusingForCausalLM lets Trainer average the means of 4 micro-batches")
    log.clear()
    tokens = losses(tmp_path / "tokens", refusing(), options={"compute_loss_func": documented_loss(tmp_path)})
    assert "average the means" not in log.text
    assert tokens == pytest.approx(expected, abs=1e-5)
    assert means != pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("model", "arguments", "kind"),
    [
        (refusing, {}, Trainer),  # one micro-batch
        (tiny_model, {"gradient_accumulation_steps": 2}, Trainer),
        (refusing, {"gradient_accumulation_steps": 2}, OwnLoss),
    ],
)
def test_nothing_is_said_where_it_makes_no_difference_or_is_not_known(tmp_path, model, arguments, kind):
    assert why_tokens_weigh_unequally(make_trainer(tmp_path, model(), kind, **arguments)) is None
