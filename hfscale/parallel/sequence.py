"""Sequence parallelism: between the blocks of a layer, each tensor parallel rank keeps its part of the sequence.

Norms, residuals and what stages send each other are (batch, sequence / tp, hidden) instead of whole and alike on every
rank; attention and MLP see the whole sequence (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

| block | on the way in, and back | on the way out, and back |
|---|---|---|
| lean: linear layers cut by columns, then by rows | all-gather, reduce-scatter | reduce-scatter, all-gather |
| any other (experts, adapters): whole on each rank | all-gather, slice | slice, all-gather |

A lean block moves what plain tensor parallelism moves in its all-reduces; the others half as much again. Parameters
that only see a part of the tokens (norms, biases added after the reduce-scatter) have a part of their gradient on each
rank: it is summed once per step (`hfscale.parallel.gradients.sum_partial_gradients`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from hfscale.errors import UnsupportedModelError
from hfscale.parallel.partition import IdentityStage, StageCut
from hfscale.parallel.shards import local_tensor
from hfscale.parallel.structure import ModelStructure

_SEQUENCE = Shard(1)
_PER_HEAD = "replicated_with_grad_allreduce"  # norms inside attention, of which each rank has its own heads'


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Which modules see a part of the sequence, and which all of it; names within the whole model."""

    whole: tuple[str, ...]
    """Blocks that compute the same on every rank."""
    lean: tuple[str, ...]
    """Blocks of which every rank computes a part."""
    columns: tuple[str, ...]
    """Linear layers in lean blocks that are cut by columns."""
    rows: tuple[str, ...]
    """Linear layers in lean blocks that are cut by rows."""
    apart: tuple[str, ...]
    """Parameters that see only this rank's tokens."""

    def rest_of(self, tensor_plan: Mapping[str, str]) -> dict[str, str]:
        """A tensor-parallel plan without the hooks that this one puts in their place; parameters are cut as before."""
        replaced = {*self.columns, *self.rows}
        return {name: style for name, style in tensor_plan.items() if name not in replaced}


def plan_sequences(model: PreTrainedModel, structure: ModelStructure, tensor_plan: Mapping[str, str]) -> SequencePlan:
    """Look at a whole `model` for what may see a part of the sequence.

    Raises:
        UnsupportedModelError: something in or behind its layers is neither a norm nor a block.
    """
    found: dict[str, list[str]] = {"whole": [], "lean": [], "columns": [], "rows": [], "apart": []}
    for number in range(structure.depth):
        name = f"{structure.layers}.{number}"
        layer = model.get_submodule(name)
        found["apart"] += [f"{name}.{own}" for own, _ in layer.named_parameters(recurse=False)]
        for child, module in layer.named_children():
            _place(found, f"{name}.{child}", module, tensor_plan)
    for name in structure.after:
        module = model.get_submodule(name)
        if name != structure.head and not _is_norm(module):
            raise _not_known(model, name)
        _place(found, name, module, tensor_plan, last="colwise")  # logits stay cut
    return SequencePlan(**{kind: tuple(names) for kind, names in found.items()})


def _place(
    found: dict[str, list[str]], name: str, module: nn.Module, tensor_plan: Mapping[str, str], *, last: str = "rowwise"
) -> None:
    """Note what `module` is; a lean block ends with linear layers of style `last`."""
    if not any(True for _ in module.parameters()):
        return  # activations, dropouts, rotary angles
    if _is_norm(module):
        found["apart"] += [f"{name}.{own}" for own, _ in module.named_parameters()]
        return
    linear = dict(_linear_layers(name, module, tensor_plan))
    if None in linear.values() or last not in linear.values():
        found["whole"].append(name)
        return
    found["lean"].append(name)
    found["columns"] += [own for own, style in linear.items() if style == "colwise"]
    rows = [own for own, style in linear.items() if style == "rowwise"]
    found["rows"] += rows
    found["apart"] += [f"{own}.bias" for own in rows]


def _linear_layers(name: str, module: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """The style of each module in a block that has parameters; None for what makes the block not lean."""
    for own, part in module.named_modules(prefix=name):
        if any(True for _ in part.parameters(recurse=False)):
            style = plan.get(own)
            is_linear = type(part) is nn.Linear and style in ("colwise", "rowwise")
            yield own, style if is_linear or style == _PER_HEAD else None


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in module.parameters())


def _not_known(model: PreTrainedModel, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"--sequence_parallel: {name} of {type(model).__name__} is neither norm nor head; leave the flag out"
    )


def apply_sequences(
    model: PreTrainedModel, structure: ModelStructure, plan: SequencePlan, mesh: DeviceMesh
) -> set[str]:
    """Hook the blocks of a (pruned) `model` whose parameters have been cut over `mesh`, in place.

    Returns:
        Names of the parameters that every rank holds whole and has a part of the gradient of.
    """
    modules = {name: module for name, module in model.named_modules() if not isinstance(module, IdentityStage)}
    for name in plan.lean:
        if name in modules:
            modules[name].register_forward_pre_hook(partial(_gather, mesh, Partial()), with_kwargs=True)
    for name in plan.whole:
        if name in modules:
            modules[name].register_forward_pre_hook(partial(_gather, mesh, Replicate()), with_kwargs=True)
            if name != structure.head:
                modules[name].register_forward_hook(partial(_slice_output, mesh))
    for name in plan.columns:
        if name in modules:
            modules[name].forward = partial(_columns, modules[name])
    for name in plan.rows:
        if name in modules:
            modules[name].forward = partial(_rows, modules[name], mesh)
    return {name for name, _ in model.named_parameters() if name in set(plan.apart)}


def _gather(mesh: DeviceMesh, gradient: Placement, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A block's first argument, (batch, sequence / tp, hidden) -> (batch, sequence, hidden). Where ranks each have a
    part of the gradient of the whole, it is a reduce-scatter on the way back; where each has all of it, a slice."""

    def whole(hidden: torch.Tensor) -> torch.Tensor:
        parts = DTensor.from_local(hidden, mesh, [_SEQUENCE], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])

    return _with_first(args, kwargs, whole)


def _slice_output(mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    """A block's output, or the first of several: this rank's part of the sequence."""
    if isinstance(output, tuple):
        return (slice_sequence(output[0], mesh), *output[1:])
    return slice_sequence(output, mesh)


def slice_sequence(hidden: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """(batch, sequence, hidden), the same on every rank -> this rank's (batch, sequence / tp, hidden)."""
    whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[_SEQUENCE]).to_local()


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, kwargs | {name: change(kwargs[name])}


def _columns(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """(batch, sequence, hidden) -> (batch, sequence, features / tp); nothing is sent."""
    bias = None if linear.bias is None else local_tensor(linear.bias)
    return nn.functional.linear(hidden, local_tensor(linear.weight), bias)


def _rows(linear: nn.Linear, mesh: DeviceMesh, features: torch.Tensor) -> torch.Tensor:
    """(batch, sequence, features / tp) -> the sum over the ranks, (batch, sequence / tp, hidden)."""
    part = nn.functional.linear(features, local_tensor(linear.weight))
    summed = DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[_SEQUENCE])
    hidden = summed.to_local()
    return hidden if linear.bias is None else hidden + local_tensor(linear.bias)


class StageInput(IdentityStage):
    """Stands in front of a stage's first layer: what comes from the embedding is sliced, and what comes from another
    stage, in slices already, takes the place of the stand-in that went through the decoder.

    Args:
        layer (`nn.Module`): the layer.
        mesh (`DeviceMesh`): the tensor parallel ranks.
    """

    def __init__(self, layer: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(layer)
        self.layer = layer
        self._mesh = mesh
        self._received: torch.Tensor | None = None

    def stage_hidden_states(self, received: torch.Tensor) -> torch.Tensor:
        """Keep this rank's part of the hidden states until the layer is called; returns zeros of the whole's shape,
        in the memory of one, from which decoders make masks and positions."""
        self._received = received
        rows, length, hidden = received.shape
        return received.new_zeros(()).expand(rows, length * self._mesh.size(), hidden)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's, with the hidden states first."""
        received, self._received = self._received, None

        def own(hidden: torch.Tensor) -> torch.Tensor:
            # A copy: a view would keep the whole embedding's output until the backward pass.
            return slice_sequence(hidden, self._mesh).clone() if received is None else received

        args, kwargs = _with_first(args, kwargs, own)
        return self.layer(*args, **kwargs)


def enter(view: PreTrainedModel, structure: ModelStructure, cut: StageCut, mesh: DeviceMesh) -> StageInput:
    """Put an `Enter` in front of the first layer of a stage's `view`."""
    layers = view.get_submodule(structure.layers)
    layers[cut.layers.start] = StageInput(layers[cut.layers.start], mesh)
    return layers[cut.layers.start]
