"""Keeps the parameters of adapters where PEFT would put others in their place when it loads them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hfscale.core.versions import is_peft_model


@contextmanager
def adapters_in_place(model: nn.Module | None) -> Iterator[None]:
    """Let what is loaded within the block be in the parameters that a model had before, in their data type.

    PEFT (0.21, `cast_adapter_dtype`) makes new parameters in float32 of adapters in bfloat16 and float16 when it loads
    them. A resumed run would then train in another data type than the run before; and with an optimizer that was made
    before, as with one that is given to the Trainer, it would train nothing, without an error.

    Args:
        model (`nn.Module`, *optional*): the model of a Trainer. One without adapters is not affected.
    """
    if model is None or not is_peft_model(model):
        yield
        return
    # One that two modules share is replaced in each of them
    named = model.named_parameters(remove_duplicate=False)
    before = [(name, weight) for name, weight in named if weight.requires_grad]
    yield
    for name, weight in before:
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        loaded = getattr(owner, last)
        if loaded is weight:
            continue
        with torch.no_grad():
            weight.copy_(loaded)
        setattr(owner, last, weight)
