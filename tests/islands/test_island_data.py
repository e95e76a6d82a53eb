"""The share of the training data that each island reads in each epoch."""

import datasets
import pytest
from tiny import RandomTokens, tiny_arguments, tiny_model
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback

from hfscale.errors import DataError
from hfscale.islands.data import continue_data_at, island_share, read_share_of_epoch

NUMBERS = list(range(14))


def of_hub():
    return datasets.Dataset.from_dict({"n": NUMBERS, "unused": NUMBERS}).shuffle(seed=1)


def read(loader):
    return [int(row) for row in loader]


@pytest.mark.parametrize("make", [lambda: NUMBERS, of_hub], ids=["list", "datasets"])
@pytest.mark.parametrize("workers", [0, 1])
def test_islands_share_each_epoch_and_one_that_is_left_reads_all_samples_in_turn(make, workers):
    """Also where loader workers live longer than an epoch, and after Trainer has removed columns from a copy."""
    loaders = []
    for island in range(3):
        share = island_share(make(), islands=3, island=island)
        if isinstance(share, datasets.Dataset):
            share = share.remove_columns(["unused"])
        loaders.append(
            DataLoader(
                share,
                batch_size=None,
                num_workers=workers,
                persistent_workers=workers > 0,
                collate_fn=lambda row: row["n"] if isinstance(row, dict) else row,
            )
        )
    seen_by_the_last = []
    for epoch in range(3):
        for island, loader in enumerate(loaders):
            read_share_of_epoch(loader, island=island, epoch=epoch)
        shares = [read(loader) for loader in loaders]
        assert [len(share) for share in shares] == [4, 4, 4]
        together = [n for share in shares for n in share]
        assert len(set(together)) == 12  # no sample twice in an epoch
        seen_by_the_last += shares[2]
    assert sorted(seen_by_the_last) == sorted(together)  # no share stays unread


def test_islands_in_different_epochs_read_every_sample_of_an_epoch_once():
    """An island that returns may be in another epoch than the others: what it reads depends on its epoch alone."""
    share = island_share(NUMBERS, islands=2, island=1)
    loader = DataLoader(share, batch_size=None)
    read_share_of_epoch(loader, island=1, epoch=5)
    late = read(loader)
    read_share_of_epoch(loader, island=1, epoch=3)
    assert read(loader) == late == NUMBERS[::2]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(NUMBERS)


def test_streams_keep_their_share():
    loader = DataLoader(island_share(Stream(), islands=2, island=1), batch_size=None)
    read_share_of_epoch(loader, island=1, epoch=1)
    assert read(loader) == NUMBERS[1::2]


def test_fewer_samples_than_islands_are_refused():
    with pytest.raises(DataError, match="for 15 islands"):
        island_share(NUMBERS, islands=15, island=0)


class MovesData(TrainerCallback):
    """Moves the data before training, as an island does that takes the state of another one."""

    def __init__(self, before, step):
        self.before = before
        self.step = step

    def on_train_begin(self, args, state, control, **kwargs):
        """Count the steps of the others, and let the data follow."""
        state.global_step = self.step
        sizes = {"steps_per_epoch": 5, "samples_per_step": 4, "accumulation": 2}
        assert continue_data_at(kwargs["train_dataloader"], self.step, before=self.before, **sizes) is not None


class Reads(Trainer):
    """Keeps what each step reads."""

    def training_step(self, model, inputs, *args, **kwargs):
        """Keep the batch."""
        self.read = getattr(self, "read", {})
        self.read.setdefault(self.state.global_step, []).append(inputs["input_ids"].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


def read_by_steps(folder, *callbacks, resume=None, **arguments):
    """Train three shuffled epochs of five steps of two batches; return the batches by step."""
    flags = {"max_steps": 15, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = Reads(
        model=tiny_model(),
        args=tiny_arguments(folder, **flags, **arguments),
        train_dataset=RandomTokens(20),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.state.global_step == 15
    return trainer.read


def test_an_island_that_takes_a_later_state_reads_what_an_unbroken_run_reads(tmp_path):
    """Also in a later epoch, where Trainer skips more batches than this epoch has had."""
    unbroken = read_by_steps(tmp_path / "unbroken", save_strategy="steps", save_steps=1)
    for before, step in [(0, 3), (2, 4), (3, 11), (4, 5), (0, 14), (4, 14)]:
        checkpoint = str(tmp_path / "unbroken" / f"checkpoint-{before}") if before else None
        moved = read_by_steps(tmp_path / "moved", MovesData(before, step), resume=checkpoint, save_strategy="no")
        assert moved == {number: rows for number, rows in unbroken.items() if number >= step}, (before, step)
