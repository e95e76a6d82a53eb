"""The share of the training data that an island reads: the samples of all islands together, without overlap.

With K islands, share k has every K-th sample, beginning with number k. In epoch e, from 0, island i reads share
(i + e) modulo K. So each share is read once in each epoch while all islands are there. If islands are away for good,
the others read the shares of the missing ones in later epochs, and all shares equally often. The rule depends on the
epoch alone: an island that returns, or that is at another step, never reads what another one reads in the same epoch.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset, Subset

from hfscale.errors import DataError
from hfscale.preemption.workers import end_workers_of


def island_share(dataset: Any, *, islands: int, island: int) -> Any:
    """Return every `islands`-th sample, beginning with number `island`.

    All islands get equally many samples: up to `islands` - 1 at the end are left out. `read_share_of_epoch` changes
    the share of data that are read by index; data without a length keep theirs.

    Args:
        dataset (`Dataset` or `IterableDataset`): the training data of all islands.
        islands (`int`): number of islands.
        island (`int`): number of this island, from 0.

    Returns:
        The share, of a kind that Trainer treats as it treats `dataset`.

    Raises:
        DataError: there are fewer samples than islands.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return split_dataset_by_node(dataset, rank=island, world_size=islands)
    if isinstance(dataset, IterableDataset):
        return _EveryNth(dataset, islands, island)
    size = len(dataset) // islands * islands
    if size == 0:
        raise DataError(f"--islands is {islands}: the training data has {len(dataset)} samples; give at least as many")
    shares = [range(k, size, islands) for k in range(islands)]
    if isinstance(dataset, datasets.Dataset):
        share = dataset.select(shares[island])
        # A copy with other columns keeps this attribute. One sample per share needs no table of indices.
        share.hfscale_shares = None if size == islands else [dataset.select(k)._indices for k in shares]
        return share
    return _Share(dataset, shares, island)


def read_share_of_epoch(loader: Any, *, island: int, epoch: int) -> None:
    """Let an island read its share of an epoch. Call it before the data loader begins the epoch.

    Args:
        loader (`DataLoader`): a loader of what `island_share` returned, or of a copy of it with other columns.
        island (`int`): number of this island, from 0.
        epoch (`int`): the epoch, from 0.
    """
    dataset = loader.dataset
    if isinstance(dataset, _Share):
        dataset.indices = dataset.shares[(island + epoch) % len(dataset.shares)]
    elif shares := getattr(dataset, "hfscale_shares", None):
        dataset._indices = shares[(island + epoch) % len(shares)]
    else:
        return
    if loader.persistent_workers:
        end_workers_of(loader)  # they have a copy of the previous share


class _Share(Subset):
    def __init__(self, dataset: Any, shares: list[range], island: int) -> None:
        super().__init__(dataset, shares[island])
        self.shares = shares


class _EveryNth(IterableDataset):
    def __init__(self, dataset: IterableDataset, islands: int, island: int) -> None:
        self._dataset = dataset
        self._every = (island, None, islands)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, *self._every)
