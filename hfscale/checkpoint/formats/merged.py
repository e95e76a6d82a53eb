"""Weights that transformers holds merged in memory and writes apart, such as the experts of a layer.

`save_pretrained` gives every expert its own tensors, under the names that the model was first published with; the
model in memory has one stacked parameter per layer, and so have the optimizer and every sharded checkpoint.
transformers' own tables say how one becomes the other; here they are applied one parameter at a time.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hfscale.checkpoint.formats.view import TensorRef
from hfscale.errors import CheckpointError


def merge(weights: Mapping[str, TensorRef], model: nn.Module) -> dict[str, TensorRef]:
    """`weights` as safetensors files name them, under the names and in the shapes that `model` has in memory.

    What goes by the model's names already stays as it is; so does what the model does not know.

    Args:
        model (`nn.Module`): of transformers, without adapters, on any device; its weights are not looked at.

    Raises:
        CheckpointError: some of a parameter's parts are there and others are not.
    """
    merged, used = dict(weights), set()
    for name, tensor in _tensors_of(model):
        if name in weights:
            continue
        parts = list(revert_weight_conversion(model, {name: tensor}))  # type: ignore[arg-type]
        found = [part for part in parts if part in weights]
        if not found:
            continue  # tied, or not saved
        if len(found) < len(parts):
            raise CheckpointError(f"'{name}' is made of {len(parts)} tensors, of which {len(found)} are stored")
        used.update(parts)
        own = {part: weights[part] for part in parts}
        merged[name] = TensorRef(
            shape=tuple(tensor.shape), dtype=own[parts[0]].dtype, read=_merging(model, name, own, tuple(tensor.shape))
        )
    return {name: ref for name, ref in merged.items() if name not in used}


@torch.no_grad()
def load_merged(model: nn.Module, stored: Mapping[str, TensorRef]) -> list[str]:
    """Fill those weights of `model` that `stored`, by the names of its files, holds in parts; the names of them."""
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in stored}
    whole = merge(stored, model) if tensors else {}
    found = [name for name in tensors if name in whole]
    for name in found:
        tensors[name].copy_(whole[name].read())
    return found


def split(weights: Mapping[str, TensorRef], model: nn.Module) -> dict[str, TensorRef]:
    """`weights` by the model's names, as `save_pretrained` writes them: the way back from `merge`."""
    if not get_model_conversion_mapping(model, add_legacy=False):  # type: ignore[arg-type]
        return dict(weights)
    apart: dict[str, TensorRef] = {}
    for name, ref in weights.items():
        whole = torch.empty(ref.shape, dtype=ref.dtype, device="meta")
        parts = revert_weight_conversion(model, {name: whole})  # type: ignore[arg-type]
        read = _Splitting(model, name, ref)
        for part, tensor in parts.items():
            apart[part] = TensorRef(shape=tuple(tensor.shape), dtype=ref.dtype, read=read.part(part))
    return apart


def _tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.to("meta")) for name, tensor in model.state_dict().items()]


def _merging(
    model: nn.Module, name: str, parts: Mapping[str, TensorRef], shape: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        whole = _merged(model, {part: ref.read() for part, ref in parts.items()})
        if tuple(whole.shape) != shape:
            raise CheckpointError(f"'{name}' would be of the shape {list(whole.shape)}, the model's is {list(shape)}")
        return whole

    return read


def _merged(model: nn.Module, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One parameter from its parts, by the table that `from_pretrained` loads by."""
    table = [
        entry
        for entry in get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
        if not isinstance(entry, PrefixChange)
    ]
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    chosen: WeightConverter | None = None
    target = ""
    for part, tensor in sorted(parts.items(), key=lambda item: dot_natural_key(item[0])):
        target, pattern = rename_source_key(part, renamings, converters)
        if pattern is None:
            return tensor  # under another name, and that is all
        if chosen is None:
            chosen = copy.deepcopy(next(entry for entry in converters if pattern in entry.source_patterns))
        chosen.add_tensor(target, part, pattern, tensor)  # type: ignore[arg-type]
    assert chosen is not None
    realized: Any = next(iter(chosen.convert(target, model=model, config=model.config).values()))
    whole: torch.Tensor = realized[0] if isinstance(realized, list) else realized
    return whole


class _Splitting:
    """Parts of one parameter; what is read for the first is kept until the last."""

    def __init__(self, model: nn.Module, name: str, ref: TensorRef) -> None:
        self._model, self._name, self._ref = model, name, ref
        self._parts: dict[str, torch.Tensor] = {}

    def part(self, name: str) -> Callable[[], torch.Tensor]:
        """What reads the part `name`."""

        def read() -> torch.Tensor:
            if name not in self._parts:
                whole = self._ref.read()
                self._parts = revert_weight_conversion(self._model, {self._name: whole})  # type: ignore[arg-type]
            return self._parts.pop(name)

        return read
