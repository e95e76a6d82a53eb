"""Saved weights of FP8 trainings: ordinary tensors, which every library can read."""

from typing import Any

import torch
from torch import nn

from hfscale.trainer.strategies.tensors import stored_tensor

_INSTALLED = "_hfscale_stored_weights"


def keep_stored_weights(model: nn.Module | None) -> None:
    """Have `state_dict()` of a model return what torchao's wrappers of weights hold, from now on.

    Accelerate converts a model to FP8 with torchao when it prepares it, and its weights are wrapped then. Trainer's
    `save_model` fails with such weights on one process ("Attempted to access the data pointer on an invalid python
    storage"), and a distributed checkpoint of them can be read only where torchao is installed. The values are in
    the same memory, so that loading into the state dict, as torch's distributed checkpoints do, still works.

    Args:
        model (`nn.Module`, *optional*): the model that Trainer saves. One without such weights is not affected.
    """
    if model is None or hasattr(model, _INSTALLED):
        return
    model.register_state_dict_post_hook(_replace_wrappers)
    setattr(model, _INSTALLED, True)


def _replace_wrappers(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, torch.Tensor):
            state[name] = stored_tensor(value)
