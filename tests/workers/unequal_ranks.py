"""Begins trainings whose ranks have the same or other rows, and writes what hfscale says of each into outcomes.json.

accelerate launch … tests/workers/unequal_ranks.py
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import paths  # noqa: F401
import torch
from tiny import RandomTokens, tiny_arguments, tiny_model
from torch.utils.data import random_split
from transformers import Trainer
from transformers.data.data_collator import default_data_collator

from hfscale import SpotCheckpointCallback
from hfscale.checkpoint import equal_ranks
from hfscale.core.distributed import rank
from hfscale.errors import UsageError


class Shuffled(RandomTokens):
    """Rows in an order that each rank draws."""

    def __init__(self):
        super().__init__()
        self.rows = self.rows.tolist()
        random.Random(rank()).shuffle(self.rows)

    def __getitem__(self, index):
        ids = torch.tensor(self.rows[index])
        return {"input_ids": ids, "labels": ids}


class OwnLoader(Trainer):
    """Divides the rows itself."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=default_data_collator)


def labelled():
    """Return a model whose labels each rank has numbered in another order."""
    names = ["cat", "dog", "horse"][:: 1 if rank() == 0 else -1]
    return tiny_model(id2label=dict(enumerate(names)), label2id={name: n for n, name in enumerate(names)})


def with_heads():
    """Return a model with heads that each rank has made in another order."""
    model = tiny_model()
    names = ["cat", "dog"][:: 1 if rank() == 0 else -1]
    model.heads = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})
    return model


def part():
    return random_split(RandomTokens(), [32, 32], generator=torch.Generator().manual_seed(rank()))[0]


CASES = {
    "equal": dict,
    "shuffled": lambda: {"train_dataset": Shuffled()},
    "split": lambda: {"train_dataset": part()},
    "numbers": lambda: {"train_dataset": RandomTokens(64 - 8 * rank())},
    "labels": lambda: {"model": labelled()},
    "heads": lambda: {"model": with_heads()},
    "own loader": lambda: {"kind": OwnLoader, "train_dataset": Shuffled()},
    "own loader of the object": lambda: {"own_loader": True, "train_dataset": Shuffled()},
    "dispatched": lambda: {"train_dataset": Shuffled(), "accelerator_config": {"dispatch_batches": True}},
}


def begin(folder, *, kind=Trainer, model=None, train_dataset=None, own_loader=False, **arguments):
    """Train a step."""
    trainer = kind(
        model=model or tiny_model(),
        args=tiny_arguments(folder, max_steps=1, save_strategy="no", **arguments),
        train_dataset=train_dataset or RandomTokens(),
        data_collator=default_data_collator,
        callbacks=[SpotCheckpointCallback(cloud=None, every_minutes=None)],
    )
    if own_loader:
        trainer.get_train_dataloader = OwnLoader.get_train_dataloader.__get__(trainer)
    trainer.train()


def fail(dataset):
    raise OSError(116, "Stale file handle")


def main():
    outcomes = {}
    for name, make in CASES.items():
        try:
            begin(f"out-{name}", **make())
        except UsageError as error:
            outcomes[name] = str(error)
        else:
            outcomes[name] = "trained"
    if rank() == 1:
        equal_ranks.row_hashes = fail
    try:
        begin("out-unreadable")
    except OSError:
        outcomes["unreadable"] = "every rank stops"
    Path(f"outcomes-{rank()}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
