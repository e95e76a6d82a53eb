"""Where a model keeps its parts, which layers each pipeline stage holds, and a view of the model that runs one stage.

A stage is not a new model. It is the model in which every module of another stage is replaced by an identity: each
parameter keeps the name that it has in the checkpoint, and transformers' own forward computes masks and rotary
embeddings.
"""

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hfscale.core.spelling import spelled
from hfscale.errors import LayoutError, UnsupportedModelError

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """Names of a causal language model's modules, in the order in which a token passes them.

    They are found by inspecting the model, not from a list of families.
    """

    decoder: str
    """The module that holds the layers, such as `model` or `model.decoder`."""
    token_embedding: str
    """The table of token embeddings."""
    before: tuple[str, ...]
    """Other modules before the layers: learned positions, a norm of the embeddings."""
    layers: str
    """The list of layers."""
    depth: int
    """The number of layers."""
    after: tuple[str, ...]
    """The modules after the layers: the final norm, the head."""
    head: str
    """The module whose `weight` turns hidden states into logits; one of `after`."""
    tied: bool
    """Whether head and token embedding share their weight."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelStructure":
        """Inspect an unsplit model, on any device.

        Args:
            model (`PreTrainedModel`): a causal language model.

        Returns:
            The names of its parts.

        Raises:
            UnsupportedModelError: the model has no single stack of decoder layers between embeddings and a head.
        """
        names = {id(module): name for name, module in model.named_modules()}
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        depth = model.config.get_text_config().num_hidden_layers
        # Nothing in transformers names these parts, and the cut is right only if they are what they seem to be.
        stacks = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == depth and name.count(".") <= 2
        ]
        has_ends = embedding is not None and head is not None and id(head) in names
        if not has_ends or len(stacks) != 1 or "." not in stacks[0]:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not a stack of {depth} layers between token embeddings and a head: it "
                f"cannot be split into pipeline stages; set {spelled('pp_size', 1)}"
            )
        layers = stacks[0]
        decoder = layers.rpartition(".")[0]
        before = []
        after = []
        behind_layers = False
        for name, child in model.get_submodule(decoder).named_children():
            path = f"{decoder}.{name}"
            if path == layers:
                behind_layers = True
                continue
            computes = has_parameters(child) or (behind_layers and "Norm" in type(child).__name__)
            if child is embedding or not computes:
                continue
            if behind_layers and not isinstance(child, nn.Embedding):
                after.append(path)
            else:
                before.append(path)
        outermost = decoder.split(".")[0]
        after += [
            name
            for name, child in model.named_children()
            if name != outermost and has_parameters(child)
        ]
        return cls(
            decoder=decoder,
            token_embedding=names[id(embedding)],
            before=tuple(before),
            layers=layers,
            depth=depth,
            after=tuple(after),
            head=names[id(head)],
            tied=getattr(embedding, "weight", None) is getattr(head, "weight", None),
        )

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        """Return the list of the layers of a model that has this structure.

        Args:
            model (`nn.Module`): the model, or the view of a stage.
        """
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)  # `of` has found it as one
        return layers

    def layer_of(self, name: str) -> int | None:
        """Return the number of the layer that a parameter or module belongs to, from 0; None outside the layers.

        Args:
            name (`str`): its name in the model, such as `model.layers.3.mlp`.
        """
        match = re.match(rf"{re.escape(self.layers)}\.(\d+)(\.|$)", name)
        return int(match[1]) if match else None


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module, or one inside it, has parameters.

    Args:
        module (`nn.Module`): the module.
    """
    return any(True for _ in module.parameters())


# --- which layers a stage holds --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """The part of the model that one pipeline stage holds."""

    index: int
    """The stage's number, from 0."""
    stages: int
    """The number of stages of the pipeline."""
    layers: range
    """Numbers of its layers."""

    @property
    def is_first(self) -> bool:
        """Whether it embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm, the head and the loss."""
        return self.index == self.stages - 1


def layer_costs(model: PreTrainedModel, structure: ModelStructure) -> tuple[list[float], float]:
    """Count the multiply-accumulate operations per token of each layer and of the head.

    They are the numbers of parameters. Attention scores, which depend on the sequence length, are the same in all
    layers and left out. Of stacked experts only `num_experts_per_tok` count, which a token passes.

    Args:
        model (`PreTrainedModel`): the unsplit model.
        structure (`ModelStructure`): names of its parts.

    Returns:
        The operations per token of each layer, in order, and those of the head.
    """
    config = model.config.get_text_config()
    experts_per_token = (
        getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 1
    )
    costs = [0.0] * structure.depth
    for name, parameter in model.named_parameters():
        layer = structure.layer_of(name)
        if layer is not None and parameter.ndim >= 2:
            used = min(1.0, experts_per_token / parameter.shape[0]) if parameter.ndim == 3 else 1.0
            costs[layer] += parameter.numel() * used
    return costs, float(model.get_parameter(f"{structure.head}.weight").numel())


def partition_by_cost(costs: Sequence[float], head_cost: float, stages: int) -> list[StageSpec]:
    """Assign consecutive layers to each stage so that the slowest stage is as fast as possible.

    Among equally fast partitions the one with the smallest sum of squares is taken, which spreads the rest evenly. The
    head counts for the last stage; the embedding look-up costs nothing. The solution is exact, by dynamic programming
    over (stage, first layer).

    Args:
        costs (`Sequence[float]`): cost of each layer, in any unit.
        head_cost (`float`): cost of the head, in the same unit.
        stages (`int`): number of stages.

    Returns:
        The stages, in order.

    Raises:
        LayoutError: there are fewer layers than stages.
    """
    depth = len(costs)
    if depth < stages:
        raise LayoutError(
            f"{stages} pipeline stages need at least {stages} layers, but the model has {depth}: set "
            f"{spelled('pp_size')} or {spelled('virtual_stages')} so that there are at most {depth} stages"
        )
    totals = [0.0, *accumulate(costs)]
    last = stages - 1

    def cost(stage: int, start: int, stop: int) -> float:
        return totals[stop] - totals[start] + (head_cost if stage == last else 0.0)

    @cache
    def best(stage: int, start: int) -> tuple[float, float, int]:
        """Cost of the slowest stage and sum of squares of this stage and all later ones, when this stage starts at
        layer `start`, and where the next one starts."""
        if stage == last:
            return cost(last, start, depth), cost(last, start, depth) ** 2, depth
        found = []
        for stop in range(start + 1, depth - (last - stage) + 1):
            here = cost(stage, start, stop)
            slowest, squares, _ = best(stage + 1, stop)
            found.append((max(here, slowest), here**2 + squares, stop))
        return min(found)

    bounds = [0]
    for stage in range(stages):
        bounds.append(best(stage, bounds[-1])[2])
    return [
        StageSpec(index=index, stages=stages, layers=range(start, stop))
        for index, (start, stop) in enumerate(pairwise(bounds))
    ]


# --- a model that holds, and runs, only some stages ------------------------------------------------------------------


class IdentityStage(nn.Identity):
    """Takes the place of a module that another stage holds; returns its first argument.

    Args:
        original (`nn.Module`, *optional*): the replaced module. Its plain attributes, such as the type of a layer, are
            kept, because some decoders read them.
    """

    def __init__(self, original: nn.Module | None = None) -> None:
        super().__init__()
        for name, value in vars(original).items() if original is not None else ():
            if (
                isinstance(value, str | int | bool)
                and not name.startswith("_")
                and name != "training"
            ):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first positional argument, or the value of the first keyword."""
        return args[0] if args else next(iter(kwargs.values()))


class StageEntry(IdentityStage):
    """Takes the place of the first layer in the stages after the first one, and returns what another stage has sent.

    Whatever the decoder has computed of it before, such as a norm, a factor or positions that it adds to embeddings,
    is left out: the first stage has done that.

    Args:
        layer (`nn.Module`): the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._received: torch.Tensor | None = None

    def receive(self, hidden: torch.Tensor) -> None:
        """Keep hidden states until the decoder reaches its layers.

        Args:
            hidden (`torch.Tensor`): (rows, sequence, hidden).
        """
        self._received = hidden

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states that were received."""
        # `trace_structure` has seen that the decoder calls each layer once
        assert self._received is not None
        received = self._received
        self._received = None
        return received


class StageExit(IdentityStage):
    """Takes the place of the layer behind a stage's last one, and keeps what the stage sends to the next one.

    What the decoder makes of it afterwards is left out: the last stage does that.

    Args:
        layer (`nn.Module`): the layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self._output: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states, and keep them."""
        self._output = super().forward(*args, **kwargs)
        return self._output

    def take(self) -> torch.Tensor:
        """Return the hidden states that the last call was given, (rows, sequence, hidden)."""
        # `trace_structure` has seen that the decoder calls each layer once
        assert self._output is not None
        output = self._output
        self._output = None
        return output


class ZeroPositions(nn.Module):
    """Takes the place of learned position embeddings in later stages: the first stage has added them already."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return zero, on the device of the arguments."""
        device = next(
            value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
        )
        return torch.zeros((), device=device)


def remove_other_stages(
    model: PreTrainedModel, structure: ModelStructure, stages: Iterable[StageSpec]
) -> None:
    """Remove from a model, in place, all modules that none of this rank's stages holds.

    A head that was tied to the embedding gets a weight of its own, under its own name, where there are several stages.

    Args:
        model (`PreTrainedModel`): the unsplit model.
        structure (`ModelStructure`): names of its parts.
        stages (`Iterable[StageSpec]`): this rank's stages, in ascending order.
    """
    stages = list(stages)
    layers = structure.layers_of(model)
    kept = {layer for stage in stages for layer in stage.layers}
    for number in range(structure.depth):
        if number not in kept:
            layers[number] = IdentityStage(layers[number])
    if not any(stage.is_first for stage in stages):
        replace_embeddings(model, structure)
    if not any(stage.is_last for stage in stages):
        _replace_head(model, structure)
    elif structure.tied and stages[0].stages > 1:
        # Another rank may hold the embedding: the head needs a weight of its own, and ranks sum both gradients.
        tied = model.get_parameter(f"{structure.head}.weight")
        own = nn.Parameter(tied.detach().clone(), requires_grad=tied.requires_grad)
        model.get_submodule(structure.head).weight = own


def stage_view(
    model: PreTrainedModel, structure: ModelStructure, stage: StageSpec
) -> PreTrainedModel:
    """Make a shallow copy of a model in which only the modules of one stage compute; modules are shared, not copied.

    Args:
        model (`PreTrainedModel`): a model that holds at least this stage.
        structure (`ModelStructure`): names of its parts.
        stage (`StageSpec`): the stage whose modules compute.

    Returns:
        The view. Its decoder takes hidden states as `inputs_embeds` where it is not the first stage.
    """
    own: list[nn.Module] = []
    for number, layer in enumerate(structure.layers_of(model)):
        if number in stage.layers:
            own.append(layer)
        elif number == 0:
            own.append(StageEntry(layer))
        elif number == stage.layers.stop:
            own.append(StageExit(layer))
        else:
            own.append(IdentityStage(layer))
    view = view_with_layers(model, structure, own)
    if not stage.is_first:
        replace_embeddings(view, structure)
    if not stage.is_last:
        _replace_head(view, structure)
    return view


def view_with_layers(
    model: PreTrainedModel, structure: ModelStructure, layers: Iterable[nn.Module]
) -> PreTrainedModel:
    """Make a shallow copy of a model that has other layers; all other modules are shared, not copied.

    Args:
        model (`PreTrainedModel`): the model.
        structure (`ModelStructure`): names of its parts.
        layers (`Iterable[nn.Module]`): the layers of the copy.

    Returns:
        The copy. Modules outside the layers can be replaced in it by `replace_embeddings` without changing the model.
    """
    view = _shallow_copy(model)
    for name in (structure.layers, structure.token_embedding, *structure.before):
        _copy_path(view, model, name)
    view.set_submodule(structure.layers, nn.ModuleList(layers))
    return view


def _copy_path(view: nn.Module, model: nn.Module, name: str) -> None:
    """Copy the modules between a view and one of its modules, where they are still those of the model."""
    parent = view
    original = model
    for part in name.split(".")[:-1]:
        original = getattr(original, part)
        child = getattr(parent, part)
        if child is original:
            child = _shallow_copy(original)
            setattr(parent, part, child)
        parent = child


def replace_embeddings(model: PreTrainedModel, structure: ModelStructure) -> None:
    """Remove token embeddings, and the modules with parameters between them and the layers, from a model in place.

    Args:
        model (`PreTrainedModel`): the model, or a view of it.
        structure (`ModelStructure`): names of its parts.
    """
    model.set_submodule(structure.token_embedding, IdentityStage())
    for name in structure.before:
        is_position = isinstance(model.get_submodule(name), nn.Embedding | ZeroPositions)
        model.set_submodule(name, ZeroPositions() if is_position else IdentityStage())


def _replace_head(model: PreTrainedModel, structure: ModelStructure) -> None:
    for name in structure.after:
        model.set_submodule(name, IdentityStage())


def _shallow_copy(module: _ModuleT) -> _ModuleT:
    """Return a copy whose child modules can be replaced without changing the original; parameters are shared."""
    copied = copy.copy(module)
    # No public way: a module and its copy share the dict of child modules. test_parallel_families.py fails when
    # it moves.
    copied._modules = dict(module._modules)
    return copied
