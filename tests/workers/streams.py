"""Trains on streams without the callback, with it, and resumed; writes which losses are equal to streams.json."""

import itertools
import json
import os
import sys
from pathlib import Path

import torch
from datasets import IterableDataset
from tiny import LENGTH, VOCAB, ShrinkingCollator, logged, tiny_arguments, tiny_model
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import get_worker_info
from transformers import Trainer, TrainerCallback

from hfscale import SpotCheckpointCallback, latest_checkpoint

SHARDS, ROWS, BATCH, STEPS, STOP_AT = 4, 8, 2, 7, 5


def rows(shards):
    for shard in shards:
        generator = torch.Generator().manual_seed(shard)
        for _ in range(ROWS):
            ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator).tolist()
            yield {"input_ids": ids, "labels": ids}


def mask(row):
    ids = torch.tensor(row["input_ids"])
    return {"input_ids": torch.where(torch.rand(LENGTH) < 0.2, 3, ids).tolist()}


def few_rows(shards):
    """On two ranks a pass has four steps."""
    for shard in shards:
        yield from itertools.islice(rows([shard]), 4)


def stream(shards, generator=rows):
    return IterableDataset.from_generator(generator, gen_kwargs={"shards": shards})


class TorchStream(TorchIterableDataset):
    def __iter__(self):
        info = get_worker_info()
        shards = range(SHARDS) if info is None else range(info.id, SHARDS, info.num_workers)
        return ({name: torch.tensor(ids) for name, ids in row.items()} for row in rows(shards))


class SizedTorchStream(TorchStream):
    def __len__(self):
        return SHARDS * ROWS


class SizedStream(IterableDataset):
    def __len__(self):
        return SHARDS * ROWS


DATA = {
    "datasets": lambda: stream(list(range(SHARDS))),
    "datasets of one file": lambda: stream(tuple(range(SHARDS))),
    "datasets with a length": lambda: SizedStream(stream(list(range(SHARDS)))._ex_iterable),
    "datasets with a random map": lambda: stream(list(range(SHARDS))).map(mask),
    "few rows": lambda: stream(list(range(SHARDS)), few_rows),
    "torch": TorchStream,
    "torch with a length": SizedTorchStream,
}
EVALUATED = "few rows, with a collator that counts, evaluated"
LOADERS = {
    "default": {},
    "dispatched": {"dispatch_batches": True},
    "not dispatched": {"dispatch_batches": False},
    "split": {"split_batches": True},
}


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == STOP_AT


def losses(folder, make, *callbacks, resume=None, **arguments):
    """Train, and return the losses, with those of the evaluations if there are any."""
    args = tiny_arguments(folder, max_steps=STEPS, per_device_train_batch_size=BATCH, **arguments)
    data = {"train_dataset": make()}
    if args.eval_strategy != "no":
        data |= {"eval_dataset": list(make().take(6)), "data_collator": ShrinkingCollator()}
    trainer = Trainer(model=tiny_model(attention_dropout=0.1), args=args, callbacks=list(callbacks), **data)
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer, "loss") + logged(trainer, "eval_loss")


def compare(folder, make, loader, workers, **arguments):
    """Whether the losses until the interruption, and those after the resume, are those without the callback."""
    arguments |= {"accelerator_config": loader, "dataloader_num_workers": workers}
    plain = losses(folder, make, **arguments)
    arguments |= {"save_strategy": "steps", "save_steps": STOP_AT}
    losses(folder, make, SpotCheckpointCallback(), Stop(), **arguments)
    resumed = losses(folder, make, SpotCheckpointCallback(), resume=latest_checkpoint(folder), **arguments)
    return {"first": plain[:STOP_AT] == resumed[:STOP_AT], "resumed": plain == resumed}


def main(*wanted):
    found = {}
    for data, loader, workers in itertools.product(DATA, LOADERS, (0, 2)):
        name = f"{data}, {loader}, {workers} workers"
        if name in wanted or (not wanted and data != "few rows"):
            found[name] = compare(Path("runs", name.replace(" ", "-")), DATA[data], LOADERS[loader], workers)
    if EVALUATED in wanted:
        evaluations = {"eval_strategy": "steps", "eval_steps": 2}
        found[EVALUATED] = compare(Path("runs", "evaluated"), DATA["few rows"], {}, 0, **evaluations)
    if os.environ.get("RANK", "0") == "0":
        Path("streams.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
