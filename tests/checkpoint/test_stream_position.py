"""A resumed run continues in its stream at the recorded position, and reads no more than it needs."""

import functools
import itertools
import json
import logging
import random

import numpy as np
import pytest
import torch
import transformers
from conftest import REPOSITORY
from datasets import IterableDataset
from tiny import LENGTH, VOCAB, ShrinkingCollator, StopAt, logged, tiny_arguments, tiny_model
from transformers import Trainer

from hfscale import SpotCheckpointCallback, latest_checkpoint
from hfscale.checkpoint.positioned_stream import PositionedStream
from hfscale.checkpoint.stream_position import StreamPosition

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


def make_trainer(folder, dataset, *callbacks, **arguments):
    defaults = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": BATCH,
    }
    args = tiny_arguments(folder, **(defaults | arguments))
    model = tiny_model(attention_dropout=0.1)
    return Trainer(model=model, args=args, train_dataset=dataset, callbacks=list(callbacks))


def train(folder, prepare=lambda dataset: dataset, *, stop_at=-1, resume=None, spot=None, **arguments):
    stream = Stream()
    callbacks = [SpotCheckpointCallback()] if spot is None else spot
    trainer = make_trainer(folder, prepare(stream.dataset), *callbacks, StopAt(stop_at), **arguments)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, stream


def batched(dataset):
    """As a recipe packs: the map works on batches of records, not on single ones."""
    return dataset.map(lambda rows: {name: list(reversed(rows[name])) for name in rows}, batched=True, batch_size=6)


def noisy(row):
    """Masks tokens, with numbers of all generators that a checkpoint contains."""
    masked = torch.rand(LENGTH) < (0.2 if random.random() < 0.5 else np.random.rand())
    return {"input_ids": torch.where(masked, 3, torch.tensor(row["input_ids"])).tolist()}


def noisy_in_batches(dataset):
    """A batch of the map has more samples than a step."""

    def mask(rows):
        return {"input_ids": [noisy({"input_ids": ids})["input_ids"] for ids in rows["input_ids"]]}

    return dataset.map(mask, batched=True, batch_size=6)


IN_TWO_PASSES = [(batched, 7), (batched, 20), (batched, 23), (noisy_in_batches, 7), (noisy_in_batches, 23)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a function that trains without the callback, once for each stream."""
    trained = functools.cache(
        lambda prepare, arguments: train(
            tmp_path_factory.mktemp("plain"), prepare, spot=[], save_strategy="no", **dict(arguments)
        )[0]
    )
    return lambda prepare, arguments: trained(prepare, tuple(arguments.items()))


@pytest.mark.parametrize(
    ("prepare", "stop_at", "arguments"),
    [
        *((prepare, stop_at, {}) for prepare, stop_at in IN_TWO_PASSES),
        (lambda dataset: dataset.map(noisy), 5, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    ],
)
def test_a_resumed_run_is_the_one_without_the_callback(plain, tmp_path, prepare, stop_at, arguments, caplog):
    """In the first pass, at its end, and in the second; dropout shows that random numbers continue too."""
    plain = plain(prepare, arguments)
    arguments = arguments | {"save_steps": 1000}
    train(tmp_path / "cut", prepare, stop_at=stop_at, **arguments)
    with caplog.at_level(logging.INFO, logger="hfscale"):
        resumed, _ = train(tmp_path / "cut", prepare, resume=latest_checkpoint(tmp_path / "cut"), **arguments)
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(resumed, key) == logged(plain, key), key
    assert logged(resumed, "epoch") == pytest.approx(logged(plain, "epoch"), rel=1e-12)
    assert "the stream continues after" in caplog.text
    assert "read again" not in caplog.text
    if stop_at == 23:
        assert "after 12 sequences of pass 2" in caplog.text


@pytest.mark.world(2)
@pytest.mark.long
def test_two_processes_read_what_they_read_without_the_callback(launch, tmp_path):
    """Also where Accelerate gives each process its own files, and where it splits a batch between the processes.

    With workers, the interruption is in the second pass. A collator that counts has another count on each rank, as one
    rank collates the batches of the stream, and each those of its evaluations.
    """
    cases = [f"datasets with a random map, {loader}, 0 workers" for loader in ("not dispatched", "split")]
    cases += ["few rows, default, 2 workers", "few rows, with a collator that counts, evaluated"]
    done = launch(2, REPOSITORY / "tests" / "workers" / "streams.py", *cases)
    assert done.code == 0, done.err
    found = json.loads((tmp_path / "streams.json").read_text())
    own_files, split, second_pass, evaluated = (found[case] for case in cases)
    assert own_files["first"]
    assert split == {"first": True, "resumed": True}
    assert second_pass == {"first": True, "resumed": True}
    assert evaluated == {"first": True, "resumed": True}


def test_a_resumed_run_reads_only_what_follows(tmp_path):
    """Of 80,000 sequences; the data loader reads a batch ahead, and a batch of the map is read again."""

    def prepare(dataset):
        return batched(dataset.repeat(1000))

    train(tmp_path, prepare, stop_at=STEPS - 2)
    _, stream = train(tmp_path, prepare, resume=latest_checkpoint(tmp_path))
    assert stream.read < 32


@pytest.mark.long
def test_with_a_shuffle_buffer_the_stream_is_read_again(tmp_path, caplog):
    def prepare(dataset):
        return dataset.shuffle(seed=0, buffer_size=10)

    uninterrupted, _ = train(tmp_path / "uninterrupted", prepare)
    train(tmp_path / "cut", prepare, stop_at=23)
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        resumed, _ = train(tmp_path / "cut", prepare, resume=latest_checkpoint(tmp_path / "cut"))
    assert logged(resumed, "loss") == logged(uninterrupted, "loss")
    assert "the 12 sequences already seen are read again" in caplog.text


def test_only_the_positions_that_a_step_may_need_are_remembered(tmp_path):
    """A pass of a real stream has more samples than a host has memory for."""
    stream = PositionedStream(Stream().dataset)
    stream.remembered = 8
    for count, _ in enumerate(stream, start=1):
        assert len(stream._positions) == min(count, 8)
    assert stream.num_shards == SHARDS  # an attribute of the dataset
    seen = {}

    class Look(StopAt):
        def on_epoch_end(self, args, state, control, **kwargs):
            (position,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, StreamPosition)]
            seen.update(is_trained_on=trainer.train_dataset is position.stream, kept=len(position.stream._positions))

    trainer = make_trainer(tmp_path, Stream().dataset, SpotCheckpointCallback(), Look(-1))
    trainer.train()
    assert seen["is_trained_on"]
    assert seen["kept"] <= 4 * BATCH


def noisy_rows(dataset):
    return dataset.map(noisy)


@pytest.mark.parametrize(
    ("workers", "prepare", "stop_at"),
    [
        (2, noisy_rows, 20),
        (3, batched, 23),
        *(pytest.param(2, noisy_rows, step, marks=pytest.mark.faults) for step in (7, 23)),
    ],
)
@pytest.mark.long
def test_with_data_loader_workers_the_stream_is_read_again_exactly(tmp_path, caplog, workers, prepare, stop_at):
    """Also in the second pass and between the two, with functions that draw random numbers in the workers."""
    arguments = {"dataloader_num_workers": workers, "save_steps": 1000}
    uninterrupted, _ = train(tmp_path / "uninterrupted", prepare, **arguments)
    train(tmp_path / "cut", prepare, stop_at=stop_at, **arguments)
    with caplog.at_level(logging.INFO, logger="hfscale"):
        resumed, _ = train(tmp_path / "cut", prepare, resume=latest_checkpoint(tmp_path / "cut"), **arguments)
    assert logged(resumed, "loss") == logged(uninterrupted, "loss")
    assert "dataloader_num_workers to 0" in caplog.text
    assert f"the {4 * (stop_at % 20)} sequences already seen of pass {stop_at // 20 + 1} are read again" in caplog.text


class LoaderOfALibrary:
    """A loader without a dataset, which skips batches itself, as that of ms-swift."""

    def __init__(self, base, skipped=0):
        self.base, self.skipped = base, skipped

    def set_epoch(self, epoch):
        self.base.set_epoch(epoch)

    def __iter__(self):
        return itertools.islice(self.base, self.skipped, None)


def test_a_loader_of_a_library_has_no_position(tmp_path, monkeypatch):
    """The resumed launch ended with an AttributeError."""
    get = Trainer.get_train_dataloader
    monkeypatch.setattr(Trainer, "get_train_dataloader", lambda trainer: LoaderOfALibrary(get(trainer)))
    monkeypatch.setattr(
        transformers.trainer, "skip_first_batches", lambda loader, count: LoaderOfALibrary(loader.base, count)
    )
    arguments = {"max_steps": 8, "save_steps": 1000, "dataloader_num_workers": 1}
    whole, _ = train(tmp_path / "whole", **arguments)
    train(tmp_path / "cut", stop_at=5, **arguments)
    resumed, _ = train(tmp_path / "cut", resume=latest_checkpoint(tmp_path / "cut"), **arguments)
    assert logged(resumed, "loss") == logged(whole, "loss")


def test_another_number_of_data_loader_workers_is_another_order_and_reported(tmp_path, caplog):
    train(tmp_path, stop_at=7, dataloader_num_workers=2, save_steps=1000)
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        train(tmp_path, dataloader_num_workers=0, resume=latest_checkpoint(tmp_path), max_steps=8, save_steps=1000)
    assert "2 processes of the data loader read the stream, and now 0 do" in caplog.text


@pytest.mark.parametrize(("workers", "is_another_order"), [(1, False), (2, True)])
def test_another_batch_per_device_is_another_order_where_data_loader_workers_take_turns(
    tmp_path, caplog, workers, is_another_order
):
    arguments = {"dataloader_num_workers": workers, "max_steps": 8, "save_steps": 1000}
    train(tmp_path, stop_at=7, **arguments)
    arguments |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with caplog.at_level(logging.WARNING, logger="hfscale"):
        train(tmp_path, resume=latest_checkpoint(tmp_path), **arguments)
    assert ("in turns of 4 sequences, and now of 2" in caplog.text) == is_another_order
    assert ("that step goes on with the next pass" in caplog.text) == (not is_another_order)


def test_a_stream_that_fails_fails_the_training(tmp_path):
    def broken(row):
        raise ValueError("row 9 is broken")

    with pytest.raises(ValueError, match="row 9 is broken"):
        train(tmp_path, lambda dataset: dataset.map(broken))


@pytest.mark.parametrize("stop_at", [10, 20], ids=["inside a pass", "after a pass"])
def test_a_collator_keeps_what_it_has_counted_in_the_evaluation_of_a_saved_step(tmp_path, stop_at):
    def losses(folder, stop_at=-1, resume=None):
        stream = Stream()
        arguments = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": 10, "save_steps": 10}
        trainer = Trainer(
            model=tiny_model(),
            args=tiny_arguments(folder, save_strategy="steps", per_device_train_batch_size=BATCH, **arguments),
            train_dataset=stream.dataset,
            eval_dataset=list(Stream().dataset.take(6)),
            data_collator=ShrinkingCollator(),
            callbacks=[SpotCheckpointCallback(), StopAt(stop_at)],
        )
        trainer.train(resume_from_checkpoint=resume)
        return logged(trainer, "loss")

    whole = losses(tmp_path / "whole")
    losses(tmp_path / "run", stop_at=stop_at)
    assert losses(tmp_path / "run", resume=latest_checkpoint(tmp_path / "run")) == whole
