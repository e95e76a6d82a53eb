"""Sequence parallelism: between the blocks of a layer, each tensor parallel rank keeps its part of the sequence.

Norms, residuals and the hidden states that stages exchange are (B, S / tp, hidden), instead of complete and equal on
every rank; attention and MLP get the complete sequence (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

| block | input, and its gradient | output, and its gradient |
|---|---|---|
| sharded: colwise, then rowwise linear layers | all-gather, reduce-scatter | reduce-scatter, all-gather |
| replicated: any other (experts, adapters), equal on each rank | all-gather, slice | slice, all-gather |

A sharded block sends what plain tensor parallelism sends in its all-reduces; a replicated block sends half as much
again. Parameters that see only a part of the tokens (norms, biases added after the reduce-scatter) have a part of
their gradient on each rank: it is summed once per step (`hfscale.parallel.gradients.sum_partial_gradients`).

Shapes: B = batch, S = tokens of a sequence, hidden = the model's width, features = the width inside a block.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from transformers import PreTrainedModel

from hfscale.core.spelling import spelled
from hfscale.errors import UnsupportedModelError
from hfscale.parallel.mesh import local_tensor
from hfscale.parallel.partition import IdentityStage, ModelStructure, StageSpec
from hfscale.parallel.tensor import PARTIAL_GRADIENT_STYLE

_SEQUENCE_SHARD = Shard(1)


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """Which modules get a part of the sequence, and which the complete sequence; names of the unsplit model."""

    replicated: tuple[str, ...]
    """Blocks that compute the same on every rank."""
    sharded: tuple[str, ...]
    """Blocks of which every rank computes a part."""
    colwise: tuple[str, ...]
    """Linear layers in sharded blocks that are sharded by columns."""
    rowwise: tuple[str, ...]
    """Linear layers in sharded blocks that are sharded by rows."""
    local_tokens: tuple[str, ...]
    """Parameters that see only this rank's tokens."""

    def remaining_tensor_plan(self, tensor_plan: Mapping[str, str]) -> dict[str, str]:
        """Return the tensor-parallel plan without the module hooks that sequence parallelism replaces.

        Parameters are sharded as before.

        Args:
            tensor_plan (`Mapping`): name -> style of tensor parallelism.
        """
        replaced = {*self.colwise, *self.rowwise}
        return {name: style for name, style in tensor_plan.items() if name not in replaced}


def plan_sequence_parallel(
    model: PreTrainedModel, structure: ModelStructure, tensor_plan: Mapping[str, str]
) -> SequencePlan:
    """Work out which modules of a model may get a part of the sequence.

    Args:
        model (`PreTrainedModel`): the unsplit model.
        structure (`ModelStructure`): names of its parts.
        tensor_plan (`Mapping`): name -> style of tensor parallelism.

    Returns:
        The plan.

    Raises:
        UnsupportedModelError: a module after the layers is neither a norm nor the head.
    """
    found: dict[str, list[str]] = {
        kind: [] for kind in ("replicated", "sharded", "colwise", "rowwise", "local_tokens")
    }
    for number in range(structure.depth):
        name = f"{structure.layers}.{number}"
        layer = model.get_submodule(name)
        found["local_tokens"] += [
            f"{name}.{own}" for own, _ in layer.named_parameters(recurse=False)
        ]
        for child, module in layer.named_children():
            _classify(found, f"{name}.{child}", module, tensor_plan)
    for name in structure.after:
        module = model.get_submodule(name)
        if name != structure.head and not _is_norm(module):
            raise UnsupportedModelError(
                f"{spelled('sequence_parallel')} is true: {name} of {type(model).__name__} is neither a norm nor the "
                "head; leave it out"
            )
        _classify(found, name, module, tensor_plan, last_style="colwise")  # logits stay sharded
    return SequencePlan(**{kind: tuple(names) for kind, names in found.items()})


def _classify(
    found: dict[str, list[str]],
    name: str,
    module: nn.Module,
    tensor_plan: Mapping[str, str],
    *,
    last_style: str = "rowwise",
) -> None:
    """Add `module` to the lists that it belongs to; a sharded block ends with linear layers of style `last_style`."""
    if not any(True for _ in module.parameters()):
        return  # activations, dropouts, rotary embeddings
    if _is_norm(module):
        found["local_tokens"] += [f"{name}.{own}" for own, _ in module.named_parameters()]
        return
    linear = dict(_linear_layers(name, module, tensor_plan))
    if None in linear.values() or last_style not in linear.values():
        found["replicated"].append(name)
        return
    found["sharded"].append(name)
    found["colwise"] += [own for own, style in linear.items() if style == "colwise"]
    rowwise = [own for own, style in linear.items() if style == "rowwise"]
    found["rowwise"] += rowwise
    found["local_tokens"] += [f"{own}.bias" for own in rowwise]


def _linear_layers(
    name: str, module: nn.Module, plan: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    """Yield name and style of each module with parameters; the style is None if a sharded block cannot contain it."""
    for own, part in module.named_modules(prefix=name):
        if any(True for _ in part.parameters(recurse=False)):
            style = plan.get(own)
            is_linear = type(part) is nn.Linear and style in ("colwise", "rowwise")
            yield own, style if is_linear or style == PARTIAL_GRADIENT_STYLE else None


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and all(p.ndim == 1 for p in module.parameters())


def apply_sequence_parallel(
    model: PreTrainedModel, structure: ModelStructure, plan: SequencePlan, mesh: DeviceMesh
) -> set[str]:
    """Hook the blocks of a model whose parameters have been sharded over the tensor parallel ranks, in place.

    Args:
        model (`PreTrainedModel`): a model that may lack the modules of other stages.
        structure (`ModelStructure`): names of its parts.
        plan (`SequencePlan`): which modules get a part of the sequence, and which the complete sequence.
        mesh (`DeviceMesh`): the tensor parallel ranks, one axis.

    Returns:
        Names of the parameters that every rank holds completely, with only a part of their gradient.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, IdentityStage)
    }

    def here(names: Iterable[str]) -> list[str]:
        """The blocks that this rank's stages hold."""
        return [name for name in names if name in modules]

    for name in here(plan.sharded):
        modules[name].register_forward_pre_hook(
            partial(_gather_input, mesh, Partial()), with_kwargs=True
        )
    for name in here(plan.replicated):
        modules[name].register_forward_pre_hook(
            partial(_gather_input, mesh, Replicate()), with_kwargs=True
        )
        # The loss reads all tokens
        if name != structure.head:
            modules[name].register_forward_hook(partial(_slice_output, mesh))
    for name in here(plan.colwise):
        modules[name].forward = partial(_colwise_forward, modules[name])
    for name in here(plan.rowwise):
        modules[name].forward = partial(_rowwise_forward, modules[name], mesh)
    return {name for name, _ in model.named_parameters() if name in set(plan.local_tokens)}


def _gather_input(
    mesh: DeviceMesh, gradient: Placement, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Gather a block's first argument, (B, S / tp, hidden) -> (B, S, hidden).

    Where each rank has a part of the gradient (`Partial`), the backward is a reduce-scatter; where each has the
    complete gradient (`Replicate`), it is a slice.
    """

    def gather(hidden: torch.Tensor) -> torch.Tensor:
        shards = DTensor.from_local(hidden, mesh, [_SEQUENCE_SHARD], run_check=False)
        return shards.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])

    return _change_first(args, kwargs, gather)


def _slice_output(mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
    """Reduce a block's output, or the first of several outputs, to this rank's part of the sequence."""
    if isinstance(output, tuple):
        return (slice_sequence(output[0], mesh), *output[1:])
    return slice_sequence(output, mesh)


def slice_sequence(hidden: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's part of a sequence.

    Args:
        hidden (`torch.Tensor`): (B, S, hidden), equal on every rank.
        mesh (`DeviceMesh`): the tensor parallel ranks, one axis.

    Returns:
        (B, S / tp, hidden).
    """
    replicated = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    return replicated.redistribute(placements=[_SEQUENCE_SHARD]).to_local()


def _change_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `change` to the hidden states among a module's arguments, the first of them."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, kwargs | {name: change(kwargs[name])}


def _colwise_forward(linear: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """(B, S, hidden) -> (B, S, features / tp), without communication."""
    bias = None if linear.bias is None else local_tensor(linear.bias)
    return nn.functional.linear(hidden, local_tensor(linear.weight), bias)


def _rowwise_forward(linear: nn.Linear, mesh: DeviceMesh, features: torch.Tensor) -> torch.Tensor:
    """(B, S, features / tp) -> the sum over the ranks, (B, S / tp, hidden), by a reduce-scatter."""
    product = nn.functional.linear(features, local_tensor(linear.weight))
    summed = DTensor.from_local(product, mesh, [Partial()], run_check=False).redistribute(
        placements=[_SEQUENCE_SHARD]
    )
    hidden = summed.to_local()
    return hidden if linear.bias is None else hidden + local_tensor(linear.bias)


class StageInput(IdentityStage):
    """Wraps a stage's first layer, and gives it this rank's part of the hidden states.

    The output of the embedding is sliced. What another stage has sent is a part already: the decoder is called with
    zeros of the complete shape instead, and here the received part takes their place.

    Args:
        layer (`nn.Module`): the layer.
        mesh (`DeviceMesh`): the tensor parallel ranks, one axis.
    """

    def __init__(self, layer: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(layer)
        self.layer = layer
        self._mesh = mesh
        self._received: torch.Tensor | None = None

    def stage_hidden_states(self, received: torch.Tensor) -> torch.Tensor:
        """Keep received hidden states until the layer is called.

        Args:
            received (`torch.Tensor`): (B, S / tp, hidden).

        Returns:
            Zeros, (B, S, hidden) in the memory of one number, from which decoders make masks and positions.
        """
        self._received = received
        batch, length, hidden = received.shape
        return received.new_zeros(()).expand(batch, length * self._mesh.size(), hidden)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with its arguments, in which the hidden states are replaced by this rank's part of them."""
        received = self._received
        self._received = None

        def local_part(hidden: torch.Tensor) -> torch.Tensor:
            # A copy: a view would keep the embedding's complete output until the backward pass.
            return slice_sequence(hidden, self._mesh).clone() if received is None else received

        args, kwargs = _change_first(args, kwargs, local_part)
        return self.layer(*args, **kwargs)


def insert_stage_input(
    view: PreTrainedModel, structure: ModelStructure, stage: StageSpec, mesh: DeviceMesh
) -> StageInput:
    """Wrap the first layer of a stage's view, in place, in a `StageInput`.

    Args:
        view (`PreTrainedModel`): the stage's view of the model, from `stage_view`.
        structure (`ModelStructure`): names of the model's parts.
        stage (`StageSpec`): the stage.
        mesh (`DeviceMesh`): the tensor parallel ranks, one axis.

    Returns:
        The wrapper.
    """
    layers = structure.layers_of(view)
    first = StageInput(layers[stage.layers.start], mesh)
    layers[stage.layers.start] = first
    return first
