"""A resumed run goes on in its stream where it was, and reads no more than it needs."""

import logging

import pytest
import torch
from datasets import IterableDataset
from tiny import LENGTH, VOCAB, logged, tiny_arguments, tiny_model
from transformers import Trainer, TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.integrations.stream_position import PlacedStream

SHARDS, ROWS = 4, 20
STEPS, BATCH = 30, 4  # of 80 rows: one pass and a half


class Stream:
    """A stream of random sequences in four files, and how many of them were read."""

    def __init__(self):
        self.read = 0
        self.dataset = IterableDataset.from_generator(self._rows, gen_kwargs={"shards": list(range(SHARDS))})

    def _rows(self, shards):
        for shard in shards:
            generator = torch.Generator().manual_seed(shard)
            for _ in range(ROWS):
                self.read += 1
                row = torch.randint(3, VOCAB, (LENGTH,), generator=generator).tolist()
                yield {"input_ids": row, "labels": row}


def train(folder, prepare=lambda dataset: dataset, *, stop_at=None, resume=None, **arguments):
    stream = Stream()
    args = tiny_arguments(
        folder,
        max_steps=STEPS,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        lr_scheduler_type="linear",
        per_device_train_batch_size=BATCH,
        **arguments,
    )
    model = tiny_model(attention_dropout=0.1)
    trainer = Trainer(
        model=model, args=args, train_dataset=prepare(stream.dataset), callbacks=[SpotCheckpointCallback()]
    )
    if stop_at is not None:
        trainer.add_callback(StopAt(stop_at))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, stream


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def batched(dataset):
    """As a recipe packs: what a batch of records gives is not what a record gives."""
    return dataset.map(lambda rows: {name: list(reversed(rows[name])) for name in rows}, batched=True, batch_size=6)


@pytest.mark.parametrize("stop_at", [7, 20, 23])
@pytest.mark.parametrize("prepare", [lambda dataset: dataset, batched], ids=["plain", "batched"])
def test_it_goes_on_with_the_next_sample(tmp_path, prepare, stop_at, caplog):
    """In the first pass, at its end, and in the second; dropout shows that random numbers go on too."""
    whole, _ = train(tmp_path / "whole", prepare)
    train(tmp_path / "cut", prepare, stop_at=stop_at)
    with caplog.at_level(logging.INFO, logger="hfscale"):
        resumed, _ = train(tmp_path / "cut", prepare, resume=latest_checkpoint(tmp_path / "cut"))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(resumed, key) == logged(whole, key), key
    assert logged(resumed, "epoch") == pytest.approx(logged(whole, "epoch"), rel=1e-12)
    assert "the stream goes on after" in caplog.text
    if stop_at == 23:
        assert "after 12 sequences of its pass 2" in caplog.text


def test_it_reads_no_more_than_what_follows(tmp_path):
    """Of 80,000 sequences; a thread reads a little ahead, and a batch of the map is read again."""

    def prepare(dataset):
        return batched(dataset.repeat(1000))

    train(tmp_path, prepare, stop_at=STEPS - 2)
    _, stream = train(tmp_path, prepare, resume=latest_checkpoint(tmp_path))
    assert stream.read < 112


def test_a_shuffle_buffer_is_read_again(tmp_path, caplog):
    def prepare(dataset):
        return dataset.shuffle(seed=0, buffer_size=10)

    whole, _ = train(tmp_path / "whole", prepare)
    train(tmp_path / "cut", prepare, stop_at=23)
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        resumed, _ = train(tmp_path / "cut", prepare, resume=latest_checkpoint(tmp_path / "cut"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert (
        "the stream does not go on where it was, as one with a shuffle buffer cannot: the 12 sequences" in caplog.text
    )


def test_no_more_is_remembered_than_a_step_may_need(tmp_path):
    """A pass of a real stream has more samples than a host has memory for."""
    stream = PlacedStream(Stream().dataset)
    stream.remembered = 8
    for count, _ in enumerate(stream, start=1):
        assert len(stream._places) == min(count, 8)
    trainer, _ = train(tmp_path)
    assert len(trainer.train_dataset._places) <= 4 * BATCH
    assert trainer.train_dataset.num_shards == SHARDS  # as of the stream itself


def test_workers_do_not_tell_where_they_are(tmp_path, caplog):
    whole, _ = train(tmp_path / "whole", dataloader_num_workers=1)
    train(tmp_path / "cut", stop_at=7, dataloader_num_workers=1)
    with caplog.at_level(logging.INFO, logger="hfscale"):
        resumed, _ = train(tmp_path / "cut", dataloader_num_workers=1, resume=latest_checkpoint(tmp_path / "cut"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert "with dataloader_num_workers 0 it goes on there" in caplog.text
    assert "the 28 sequences already seen are read again" in caplog.text


def test_a_stream_that_fails_fails_the_training(tmp_path):
    def broken(row):
        raise ValueError("row 9 is broken")

    with pytest.raises(ValueError, match="row 9 is broken"):
        train(tmp_path, lambda dataset: dataset.map(broken))
