"""Clipping of gradients by a norm over all ranks."""

import pytest
import torch
from torch import nn

from hfscale.parallel.gradients import clip_gradients


@pytest.mark.parametrize("norm", [0.5, 7.3])
def test_all_gradients_of_a_dtype_are_scaled_at_once_and_as_one_by_one(monkeypatch, norm):
    """On a GPU each call is one kernel for a list of tensors."""
    torch.manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16] * 20
    parameters = [nn.Parameter(torch.empty(3, 5, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters[1:]:  # the first one has no gradient
        parameter.grad = torch.randn(3, 5).to(parameter.dtype)
    total = torch.tensor(norm)
    factor = torch.clamp(1.5 / (total + 1e-6), max=1.0)
    expected = [parameter.grad * factor for parameter in parameters[1:]]
    together = []
    multiply = torch._foreach_mul_

    def counted(tensors, factor):
        together.append(len(tensors))
        multiply(tensors, factor)

    monkeypatch.setattr(torch, "_foreach_mul_", counted)
    clip_gradients(parameters, total, 1.5)
    assert sorted(together) == [19, 20]
    assert all(torch.equal(p.grad, wanted) for p, wanted in zip(parameters[1:], expected, strict=True))
