"""A packed stream, also of a mix, resumes at its position: few records are read again, and the losses are equal."""

import datasets
import pytest
from test_data_cache import TEMPLATE, write
from tiny import logged, tiny_arguments, tiny_model
from transformers import Trainer, TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.recipe import corpus
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.data import load_packed_datasets

pytestmark = pytest.mark.finetuning

STEPS, STOP_AT, BATCH, BLOCK = 60, 50, 4, 16
RECORDS = 3000
WEIGHTS = (("a", 3), ("b", 1))
TOKENISED_PER_BATCH = 400  # tokens of one batch of packing, here


class Counting:
    """Counts the texts that a tokenizer gets."""

    def __init__(self, tokenizer, monkeypatch):
        self.texts = 0
        original = type(tokenizer).__call__

        def count(self_, texts, *args, **kwargs):
            self.texts += len(texts) if isinstance(texts, list) else 1
            return original(self_, texts, *args, **kwargs)

        monkeypatch.setattr(type(tokenizer), "__call__", count)


class StopAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == STOP_AT


def conversation(name, number):
    turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{name}{number}."}]
    return {"messages": turns}


@pytest.fixture
def sources(tmp_path):
    """Return the flags of a text, a mix of texts and a mix of conversations."""
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} text {n} of {n * n % 97}"} for n in range(RECORDS)])
        write(tmp_path / f"chat-{name}.jsonl", [conversation(name, n) for n in range(RECORDS)])
    for kind in ("", "chat-"):
        items = (f"- {{train_file: {tmp_path}/{kind}{name}.jsonl, weight: {weight}}}\n" for name, weight in WEIGHTS)
        (tmp_path / f"{kind}mix.yaml").write_text("".join(items))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return {
        "text": {"train_file": f"{tmp_path}/a.jsonl"},
        "mixed text": {"data_mix": f"{tmp_path}/mix.yaml"},
        "mixed conversations": {
            "data_mix": f"{tmp_path}/chat-mix.yaml",
            "chat_template": f"{tmp_path}/template.jinja",
            "document_attention": False,
            "block_size": 64,
        },
    }


def train(folder, flags, *callbacks, resume=None):
    args = DataArguments(**{"streaming": True, "block_size": BLOCK} | flags)
    tokenizer = corpus.default_tokenizer()
    dataset, _ = load_packed_datasets(args, tokenizer, seed=0)
    arguments = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": STOP_AT}
    model = tiny_model(vocab_size=len(tokenizer))
    args = tiny_arguments(folder, per_device_train_batch_size=BATCH, **arguments)
    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer, "loss")


@pytest.mark.parametrize("source", ["text", "mixed text", "mixed conversations"])
def test_a_packed_stream_resumes_at_its_position(source, sources, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("hfscale.recipe.packing._BATCH_TOKENS", TOKENISED_PER_BATCH)
    monkeypatch.setattr("hfscale.recipe.packing._BATCH_BLOCKS", 1)
    counter = Counting(corpus.default_tokenizer(), monkeypatch)
    plain = train(tmp_path / "plain", sources[source])
    in_all, counter.texts = counter.texts, 0
    train(tmp_path / "cut", sources[source], SpotCheckpointCallback(), StopAt())
    counter.texts = 0
    checkpoint = latest_checkpoint(tmp_path / "cut")
    resumed = train(tmp_path / "cut", sources[source], SpotCheckpointCallback(), resume=checkpoint)
    assert resumed == plain
    assert "read again" not in caplog.text
    assert counter.texts < 0.6 * in_all
