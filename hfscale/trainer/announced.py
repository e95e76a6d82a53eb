"""What the callbacks of one training tell each other through the Trainer's adapter: `TrainerAdapter.announced`.

Callbacks of hfscale do not import each other. One announces what it does in this training, before it begins or while
it runs, and another asks. All of it is forgotten at the end of the training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


class SavedShards(Protocol):
    """Gives what checkpoints keep of tensors of which each rank may have a part."""

    def bytes_to_allocate(self) -> int:
        """Return the host memory in bytes that the next copy would allocate on this rank."""
        ...

    def take(self, *, copies: bool) -> Mapping[str, Any]:
        """Return this rank's parts by the names of the tensors.

        Args:
            copies (`bool`): whether a later step must not change them; a copy is valid until the next call.
        """
        ...

    def files(self) -> Mapping[str, bytes]:
        """Return small files that the main process writes beside them, by name."""
        ...


@dataclass(kw_only=True)
class Announced:
    """What callbacks have announced for the training that begins or runs.

    What is known before a training (`callback_saves`, `grows_batch`, `skip_bad_batches`, `base_width`) is set in
    `before_train`, so that it is there when the first `on_train_begin` is called, and when the table of what works
    with what is asked.

    Args:
        callback_saves (`bool`): whether a callback saves, although `save_strategy` may be `no`.
        grows_batch (`bool`): whether the global batch changes.
        skip_bad_batches (`int`, *optional*): how many bad batches the run may leave out; None: none is looked for.
        base_width (`int`, *optional*): the width at which the learning rate was tuned; None: it does not follow it.
        is_interrupted (`bool`): whether the training ends early because of a notice, and another launch is to resume
            it.
        unmeasured (`dict`): metric key -> why it is not measured, None where it is: for callbacks that act on it.
        tensors (`dict`): name -> source of tensors of this rank that each checkpoint keeps, in the file
            `NAME_outer_RANK.safetensors`. Called at each save; returns copies, on the CPU, that do not change any
            more. Where there are none, no file is written. `SpotCheckpointCallback` writes this and the next two.
        json (`dict`): name -> source of JSON values of this rank that each checkpoint keeps, in the file
            `NAME_RANK.json`. Called at each save; what it returns is written out before the next step.
        shards (`dict`): name of a folder in each checkpoint -> tensors of which each rank may have a part, written as
            one of torch's distributed checkpoints.
    """

    callback_saves: bool = False
    grows_batch: bool = False
    skip_bad_batches: int | None = None
    base_width: int | None = None
    is_interrupted: bool = False
    unmeasured: dict[str, str | None] = field(default_factory=dict)
    tensors: dict[str, Callable[[], dict[str, torch.Tensor]]] = field(default_factory=dict)
    json: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    shards: dict[str, SavedShards] = field(default_factory=dict)

    def why_unmeasured(self, key: str) -> str | None:
        """Return why a metric key is not measured in this training; None: it is.

        Args:
            key (`str`): the metric key.
        """
        return self.unmeasured.get(key, "no callback measures it")
