"""Weights that transformers merges in memory and saves separately, such as the experts of a layer.

`save_pretrained` saves a separate tensor for every expert, under the names with which the model was first published.
The model in memory has one stacked parameter per layer, and so have the optimizer and every sharded checkpoint.
transformers' own conversion tables are applied here to one parameter at a time.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hfscale.checkpoint.formats.view import TensorRef
from hfscale.core.versions import convert_weight, merges_weights, weight_conversions
from hfscale.errors import CheckpointError


def merge(weights: Mapping[str, TensorRef], model: nn.Module) -> dict[str, TensorRef]:
    """Return `weights` with the names and shapes that `model` has in memory.

    Weights that already have one of the model's names, and those that the model does not know, stay as they are.

    Args:
        weights (`Mapping[str, TensorRef]`): the weights by their names in the safetensors files.
        model (`nn.Module`): a transformers model without adapters, on any device; its weights are not read.

    Raises:
        CheckpointError: some of the parts of a parameter are stored and others are not.
    """
    merged = dict(weights)
    if not merges_weights():
        return merged
    used: set[str] = set()
    for name, tensor in _meta_tensors(model):
        if name in weights:
            continue
        parts = list(_separated(model, {name: tensor}))
        found = [part for part in parts if part in weights]
        if not found:
            continue  # the parameter is tied, or was not saved
        if len(found) < len(parts):
            raise CheckpointError(
                f"'{name}' is made of {len(parts)} tensors, of which {len(found)} are stored"
            )
        used.update(parts)
        own = {part: weights[part] for part in parts}
        merged[name] = TensorRef(
            shape=tuple(tensor.shape),
            dtype=own[parts[0]].dtype,
            read=_merging(model, name, own, tuple(tensor.shape)),
        )
    return {name: ref for name, ref in merged.items() if name not in used}


@torch.no_grad()
def load_merged(model: nn.Module, stored: Mapping[str, TensorRef]) -> list[str]:
    """Load those weights of `model` that are stored as separate parts.

    Args:
        model (`nn.Module`): a transformers model; its weights are overwritten.
        stored (`Mapping[str, TensorRef]`): the weights by their names in the safetensors files.

    Returns:
        `list[str]`: the names of the weights that were loaded.
    """
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in stored}
    merged = merge(stored, model) if tensors else {}
    found = [name for name in tensors if name in merged]
    for name in found:
        tensors[name].copy_(merged[name].read())
    return found


def split(weights: Mapping[str, TensorRef], model: nn.Module) -> dict[str, TensorRef]:
    """Return `weights` with the names and shapes that `save_pretrained` saves; this is the inverse of `merge`.

    Args:
        weights (`Mapping[str, TensorRef]`): the weights by their names in `model`.
        model (`nn.Module`): a transformers model without adapters, on any device; its weights are not read.

    Returns:
        `dict[str, TensorRef]`: the weights by their names in the safetensors files. A merged parameter is read for its
            first part and kept in memory until its last part has been read.
    """
    if not merges_weights() or not weight_conversions(model):
        return dict(weights)
    separate: dict[str, TensorRef] = {}
    for name, ref in weights.items():
        merged = torch.empty(ref.shape, dtype=ref.dtype, device="meta")
        parts = _separated(model, {name: merged})
        splitting = _Splitting(model, name, ref)
        for part, tensor in parts.items():
            separate[part] = TensorRef(
                shape=tuple(tensor.shape), dtype=ref.dtype, read=splitting.reader(part)
            )
    return separate


def _separated(model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    separate: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)  # type: ignore[arg-type]
    return separate


def _meta_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.to("meta")) for name, tensor in model.state_dict().items()]


def _merging(
    model: nn.Module, name: str, parts: Mapping[str, TensorRef], shape: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        merged = _merged(model, {part: ref.read() for part, ref in parts.items()})
        if tuple(merged.shape) != shape:
            raise CheckpointError(
                f"'{name}' would have the shape {list(merged.shape)}, the model has {list(shape)}"
            )
        return merged

    return read


def _merged(model: nn.Module, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Merge one parameter from its parts, with the conversion table that `from_pretrained` uses."""
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    table = weight_conversions(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    chosen: WeightConverter | None = None
    target = ""
    for part, tensor in sorted(parts.items(), key=lambda item: dot_natural_key(item[0])):
        target, pattern = rename_source_key(part, renamings, converters)
        if pattern is None:
            return tensor  # it is only renamed
        if chosen is None:
            chosen = copy.deepcopy(
                next(entry for entry in converters if pattern in entry.source_patterns)
            )
        chosen.add_tensor(target, part, pattern, tensor)  # type: ignore[arg-type]
    assert chosen is not None
    realized: Any = next(iter(convert_weight(chosen, target, model).values()))
    merged: torch.Tensor = realized[0] if isinstance(realized, list) else realized
    return merged


class _Splitting:
    """Splits one parameter: it is read for the first part and kept until the last part has been read."""

    def __init__(self, model: nn.Module, name: str, ref: TensorRef) -> None:
        self._model = model
        self._name = name
        self._ref = ref
        self._parts: dict[str, torch.Tensor] = {}

    def reader(self, part: str) -> Callable[[], torch.Tensor]:
        """Return the function that reads the part `part`."""

        def read() -> torch.Tensor:
            if part not in self._parts:
                merged = self._ref.read()
                self._parts = _separated(self._model, {self._name: merged})
            return self._parts.pop(part)

        return read
