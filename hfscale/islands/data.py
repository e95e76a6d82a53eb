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
from torch.utils.data import IterableDataset, Sampler, Subset

from hfscale.checkpoint.preemption.workers import end_workers_of
from hfscale.errors import DataError


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
        raise DataError(
            f"the training data has {len(dataset)} samples for {islands} islands: give one for each at least"
        )
    shares = [range(k, size, islands) for k in range(islands)]
    if isinstance(dataset, datasets.Dataset):
        share = dataset.select(shares[island])
        # A copy with other columns keeps this attribute. One sample per share needs no table of indices.
        share.hfscale_shares = (
            None if size == islands else [dataset.select(k)._indices for k in shares]
        )
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
        dataset.indices = dataset.hfscale_shares[(island + epoch) % len(dataset.hfscale_shares)]
    elif shares := getattr(dataset, "hfscale_shares", None):
        dataset._indices = shares[(island + epoch) % len(shares)]
    else:
        return
    if loader.persistent_workers:
        end_workers_of(loader)  # they have a copy of the previous share


def continue_data_at(
    loader: Any,
    step: int,
    *,
    before: int,
    steps_per_epoch: int,
    samples_per_step: int,
    accumulation: int,
) -> int | None:
    """Let a loader whose training begins at one step read what a training at a later step reads.

    Trainer has chosen epoch and position for the step `before`: it begins in this epoch, and skips the batches that
    this epoch has had. The order of the samples changes instead. A new order begins with the samples that Trainer
    skips; those of `step` follow. If Trainer skips more than `step` has read of its own epoch, Trainer's first epoch
    is left empty, and the next one takes its place.

    Args:
        loader (`DataLoader`): Trainer's loader, which is not read yet.
        step (`int`): optimizer steps that the data are to follow.
        before (`int`): optimizer steps of the checkpoint, at most `step`; a multiple of `steps_per_epoch` if Trainer
            does not skip.
        steps_per_epoch (`int`): optimizer steps of an epoch; 0 for data without a length.
        samples_per_step (`int`): samples of all ranks per optimizer step.
        accumulation (`int`): batches of a rank per optimizer step.

    Returns:
        The epoch of the data in the first epoch of Trainer; None if the data cannot be moved: they have no sampler,
        or an epoch ends with fewer batches than a step needs.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    if steps_per_epoch == 0 or not hasattr(batches, "sampler") or len(loader) % accumulation:
        return None
    epoch, position = divmod(step, steps_per_epoch)
    began, skipped = divmod(before, steps_per_epoch)
    is_empty = position < skipped
    batches.sampler = _Continued(
        batches.sampler,
        epoch=epoch - is_empty,
        shift=epoch - is_empty - began,
        skipped=skipped * samples_per_step,
        position=position * samples_per_step,
        is_empty=is_empty,
    )
    return epoch - is_empty


class _Continued(Sampler[int]):
    """The order of another sampler, whose first epoch begins later, and whose epochs have other numbers."""

    def __init__(
        self, sampler: Any, *, epoch: int, shift: int, skipped: int, position: int, is_empty: bool
    ) -> None:
        self._sampler = sampler
        self._shift = shift
        parts = [slice(skipped), slice(position, None)]
        self._parts = [parts[:1], parts[1:]] if is_empty else [parts]
        """Of the order, by the epochs that are to be read first."""
        self.set_epoch(epoch - shift)

    def set_epoch(self, epoch: int) -> None:
        """Set Trainer's number of the epoch, on which the order of the wrapped sampler depends."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch + self._shift)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        order = list(self._sampler)
        for part in self._parts.pop(0) if self._parts else [slice(None)]:
            yield from order[part]


class _Share(Subset[Any]):
    def __init__(self, dataset: Any, shares: list[range], island: int) -> None:
        super().__init__(dataset, shares[island])
        self.hfscale_shares = shares


class _EveryNth(IterableDataset[Any]):
    def __init__(self, dataset: IterableDataset[Any], islands: int, island: int) -> None:
        self._dataset = dataset
        self._every = (island, None, islands)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._dataset, *self._every)
