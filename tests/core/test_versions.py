"""What hides the differences between versions uses no API that the installed versions call deprecated."""

import warnings

import pytest
import torch
from tiny import LENGTH, VOCAB, tiny_model
from torch import nn
from transformers import Gemma4TextConfig

from hfscale.core.versions import enable_recomputation, sizes_of_layers


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


def test_sizes_that_differ_between_layers_are_all_returned():
    same = Gemma4TextConfig(num_key_value_heads=4)
    other = Gemma4TextConfig(num_key_value_heads=4, num_global_key_value_heads=2, attention_k_eq_v=True)
    with pytest.raises(RuntimeError, match="num_key_value_heads"):
        _ = other.num_key_value_heads  # what the function is for
    assert sizes_of_layers(same, "num_key_value_heads") == (4,)
    assert sizes_of_layers(other, "num_key_value_heads") == (2, 4)
    assert sizes_of_layers(other, "hidden_size") == (other.hidden_size,)
    assert sizes_of_layers(other, "no_such_size") == ()
    assert sizes_of_layers(other, "layer_types") == ()
