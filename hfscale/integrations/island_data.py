"""The share of the training data that an island reads: the samples of all islands together, without overlap."""

import itertools
from collections.abc import Iterator
from typing import Any

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset, Subset

from hfscale.errors import DataError


def island_share(dataset: Any, *, islands: int, island: int) -> Any:
    """Return every `islands`-th sample, beginning with number `island`.

    All islands get equally many samples: up to `islands` - 1 at the end are left out.

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
    mine = range(island, size, islands)
    return dataset.select(mine) if isinstance(dataset, datasets.Dataset) else Subset(dataset, mine)


class _EveryNth(IterableDataset):
    def __init__(self, dataset: IterableDataset, islands: int, island: int) -> None:
        self._dataset = dataset
        self._every = (island, None, islands)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, *self._every)
