"""Names rows of a dataset that change places while the model trains: no checkpoint has the order that they are in."""

from collections.abc import Mapping
from typing import Any

from hfscale.checkpoint.dataset_rows import SAMPLE, row_hashes
from hfscale.core.logging import get_logger

logger = get_logger(__name__)


class RowsInPlace:
    """Compares some rows of a dataset with those of the beginning of the training.

    Args:
        dataset (`Any`): the training data, which has a length.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._first = row_hashes(dataset)

    def tell(self, restored: Mapping[str, Mapping[str, Any]]) -> None:
        """Say once which rows are no longer those of the beginning.

        Args:
            restored (`Mapping`): the values of the dataset that the checkpoint keeps, by path and name.
        """
        now = row_hashes(self._dataset)
        kept = {name for values in restored.values() for name in values}
        changed = []
        for place, first in self._first.items():
            attribute = place.rpartition(".")[2]
            if now.get(place, first) != first and attribute not in kept:
                changed.append(place.removeprefix(f"{SAMPLE}."))
        if not changed:
            return
        self._first = {}
        # A list has no name
        names = ", ".join(name for name in changed if name != SAMPLE) or "a list"
        logger.warning(
            "the rows of the training data (%s) change places or content while the model trains, and no checkpoint "
            "keeps that: a resumed run begins with the first ones, so that it sees other samples; keep the order of "
            "each epoch in an array of numbers that the dataset reads, or derive it from the number of the epoch",
            names,
        )
