"""What hides the differences between versions uses no API that the installed versions call deprecated."""

import warnings

import pytest
import torch
from tiny import LENGTH, VOCAB, tiny_model
from torch import nn

from hfscale.core.versions import enable_recomputation


class Wrapped(nn.Module):
    """A model of another library, which has the older name only."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def gradient_checkpointing_enable(self, kwargs):
        self.asked = kwargs
        enable_recomputation(self.model)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapped])
def test_recomputation_is_enabled_without_a_warning(wrap):
    model = tiny_model()
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = wrap(model)
        enable_recomputation(wrapped)
    assert getattr(wrapped, "asked", {"use_reentrant": False}) == {"use_reentrant": False}
    computed = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: computed.append(1))
    ids = torch.randint(3, VOCAB, (2, LENGTH))
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(computed) == 2 * len(model.model.layers)  # once more in the backward
