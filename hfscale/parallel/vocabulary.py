"""Token ids and labels beyond a model's vocabulary: an error under every layout, before the batch reaches a device.

Under tensor parallelism no rank has the row of such an id: its embedding would be zero, and a label would get a loss
without its logit. The data collator compares the largest ids, in the process that collates, so that nothing waits for
a GPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hfscale.errors import DataError
from hfscale.parallel.losses import IGNORED_LABEL

_LABELS = ("labels", "shift_labels")


class CheckedCollator:
    """A data collator that also makes sure that all ids of a batch are in the vocabulary.

    Args:
        collate (`callable`): the data collator; its batches are not changed.
        ids (`int`): rows of the model's embedding.
        labels (`int`): rows of the model's head.
    """

    def __init__(self, collate: Callable[[Any], Any], *, ids: int, labels: int) -> None:
        self.unchecked_collator = (
            collate  # a name that hfscale.checkpoint.data_order leaves out of paths
        )
        self.ids = ids
        self.labels = labels

    def __call__(self, samples: Any) -> Any:
        """Collate samples.

        Args:
            samples: as the data collator takes them.

        Returns:
            Its batch.

        Raises:
            DataError: an id or a label is not in the vocabulary.
        """
        batch = self.unchecked_collator(samples)
        if isinstance(batch, Mapping):
            self._check("input_ids", batch.get("input_ids"), self.ids)
            for name in _LABELS:
                self._check(name, batch.get(name), self.labels)
        return batch

    def _check(self, name: str, ids: Any, size: int) -> None:
        if not isinstance(ids, torch.Tensor) or not ids.numel() or ids.is_floating_point():
            return
        wrong = (ids >= size) | (ids < 0)
        if name in _LABELS:
            wrong &= ids != IGNORED_LABEL
        if bool(wrong.any()):
            raise DataError(
                f"{name} has the id {int(ids[wrong][0])}, and the model's vocabulary ends with {size - 1}: give the "
                "tokenizer of this model, or resize it (model.resize_token_embeddings(len(tokenizer))) before it is "
                "parallelized"
            )
