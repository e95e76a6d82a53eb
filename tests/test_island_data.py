"""The share of the training data that each island reads in each epoch."""

import datasets
import pytest
from torch.utils.data import DataLoader, IterableDataset

from hfscale.errors import DataError
from hfscale.integrations.island_data import island_share, read_share_of_epoch

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
    with pytest.raises(DataError, match="--islands is 15"):
        island_share(NUMBERS, islands=15, island=0)
