"""Which layers a pipeline stage holds, and a model that runs them alone.

A stage is not a new model: it is the whole one with foreign parts replaced by an identity, so that every parameter
keeps the name it has in the checkpoint, and transformers' own forward makes masks and rotary embeddings.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfscale.errors import LayoutError
from hfscale.parallel.balance import RouterBalance, WithLoss
from hfscale.parallel.context import ContextParallel
from hfscale.parallel.structure import ModelStructure

_EMBEDDING_FACTORS = ("embedding_multiplier", "embed_scale")
"""Numbers that some decoders multiply embeddings with in their own forward, Granite's among them."""


class IdentityStage(nn.Identity):
    """Stands where another stage's module stood; hands on its first argument.

    Args:
        original (`nn.Module`, *optional*): what stood there; its plain attributes (the kind of a layer, say) are kept,
            for some decoders read them on their way through the layers.
    """

    def __init__(self, original: nn.Module | None = None) -> None:
        super().__init__()
        for name, value in vars(original).items() if original is not None else ():
            if isinstance(value, str | int | bool) and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first positional argument, or the first keyword's value."""
        return args[0] if args else next(iter(kwargs.values()))


class NoPosition(nn.Module):
    """Stands where the first stage has learned positions: it added them already."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Zero, on the device of the argument."""
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        return torch.zeros((), device=device)


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """What one stage holds."""

    index: int
    """Which stage, from 0."""
    stages: int
    """Stages in all."""
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
    """Multiply-accumulates per token of each layer and of the head, from parameter counts (attention scores, which
    depend on the length of the sequence, are alike in all layers and left out).

    Of stacked experts only those count that a token passes: `num_experts_per_tok` of them.
    """
    config = model.config.get_text_config()
    per_token = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 1
    costs = [0.0] * structure.depth
    for name, parameter in model.named_parameters():
        layer = structure.layer_of(name)
        if layer is not None and parameter.ndim >= 2:
            used = min(1.0, per_token / parameter.shape[0]) if parameter.ndim == 3 else 1.0
            costs[layer] += parameter.numel() * used
    return costs, float(model.get_submodule(structure.head).weight.numel())


def cut_by_cost(costs: Sequence[float], head_cost: float, stages: int) -> list[StageCut]:
    """Consecutive layers for each stage such that the slowest stage is as fast as can be.

    Among equally fast cuts the one with the smallest sum of squares is taken: the rest is spread evenly. The head
    counts for the last stage; looking tokens up costs nothing. Solved exactly by dynamic programming over
    (stage, first layer).

    Raises:
        LayoutError: fewer layers than stages.
    """
    depth = len(costs)
    if depth < stages:
        raise LayoutError(f"{stages} pipeline stages need as many layers, and the model has {depth}: {depth} at most")
    total = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return total[stop] - total[start] + (head_cost if stage == stages - 1 else 0.0)

    # best[start]: (slowest, sum of squares, where the next stage starts) of the stages from this one on.
    last = stages - 1
    best = {start: (cost(last, start, depth), cost(last, start, depth) ** 2, depth) for start in range(depth)}
    choices = [best]
    for stage in range(stages - 2, -1, -1):
        following, best = best, {}
        for start in range(depth - (stages - stage) + 1):
            best[start] = min(
                (max(here, following[stop][0]), here**2 + following[stop][1], stop)
                for stop in range(start + 1, depth - (last - stage) + 1)
                for here in [cost(stage, start, stop)]
            )
        choices.insert(0, best)
    bounds = [0]
    for stage in range(stages):
        bounds.append(choices[stage][bounds[-1]][2])
    return [
        StageCut(index=index, stages=stages, layers=range(start, stop))
        for index, (start, stop) in enumerate(pairwise(bounds))
    ]


def prune(model: PreTrainedModel, structure: ModelStructure, cuts: Iterable[StageCut]) -> None:
    """Take out of `model`, in place, all that none of these stages holds. A head that was tied to an embedding of
    another stage gets a weight of its own, under its own name."""
    cuts = list(cuts)
    stages = cuts[0].stages
    layers = model.get_submodule(structure.layers)
    kept = {layer for cut in cuts for layer in cut.layers}
    for number in range(structure.depth):
        if number not in kept:
            layers[number] = IdentityStage(layers[number])
    if not any(cut.is_first for cut in cuts):
        _take_out_first(model, structure)
    if not any(cut.is_last for cut in cuts):
        for name in structure.after:
            model.set_submodule(name, IdentityStage())
    elif structure.tied and stages > 1:
        head = model.get_submodule(structure.head)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)


def stage_view(model: PreTrainedModel, structure: ModelStructure, cut: StageCut) -> PreTrainedModel:
    """A shallow copy of a pruned `model` in which `cut`'s parts alone do something; modules are shared, not copied."""
    view = _shallow(model)
    parent: nn.Module = view
    for part in structure.decoder.split("."):
        child = _shallow(getattr(parent, part))
        parent._modules[part] = child
        parent = child
    layers = model.get_submodule(structure.layers)
    own = [layer if number in cut.layers else IdentityStage(layer) for number, layer in enumerate(layers)]
    parent._modules[structure.layers.rpartition(".")[2]] = nn.ModuleList(own)
    if not cut.is_first:
        _take_out_first(view, structure)
        for name, child in parent.named_children():
            if isinstance(child, nn.Dropout):  # of the embeddings
                parent._modules[name] = IdentityStage()
        for name in _EMBEDDING_FACTORS:
            if hasattr(parent, name):
                setattr(parent, name, 1.0)
    if not cut.is_last:
        for name in structure.after:
            view.set_submodule(name, IdentityStage())
    return view


def _take_out_first(model: PreTrainedModel, structure: ModelStructure) -> None:
    model.set_submodule(structure.token_embedding, IdentityStage())
    for name in structure.before:
        is_position = isinstance(model.get_submodule(name), nn.Embedding | NoPosition)
        model.set_submodule(name, NoPosition() if is_position else IdentityStage())


def _shallow(module: nn.Module) -> nn.Module:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


class Stage(nn.Module):
    """One pipeline stage: hidden states (or tokens) in, hidden states (or the loss) out.

    Args:
        view (`PreTrainedModel`): of `stage_view`.
        anatomy (`ModelStructure`): where its parts are.
        cut (`StageCut`): which stage it is.
        loss (`callable`): `loss(view, inputs)` of the last stage, a scalar; `inputs` are the model's keywords.
        balance (`RouterBalance`, *optional*): the loss of its routers, where the model has one.
        stage_hidden_states (`callable`, *optional*): with sequence parallelism, takes the hidden states that come from
            another stage, (micro-batch, sequence / tp, hidden), and returns what the decoder is given.
        context (`ContextParallel`, *optional*): where this rank has a part of each sequence.
    """

    def __init__(
        self,
        view: PreTrainedModel,
        structure: ModelStructure,
        cut: StageCut,
        loss: Any,
        balance: RouterBalance | None = None,
        stage_hidden_states: Callable[[torch.Tensor], torch.Tensor] | None = None,
        context: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.view = view
        self.cut = cut
        self._stand_in_for, self._context = stage_hidden_states, context
        self._loss = loss
        self._inner = structure.decoder.split(".")[0]
        self._balance = balance
        self._balance_losses: list[torch.Tensor] = []
        if balance is not None:
            balance.watch(self)

    def forward(self, first: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Tokens (micro-batch, sequence) or hidden states (micro-batch, sequence, hidden) -> hidden states or a
        scalar loss; `labels` among the keywords are used by the last stage only."""
        if self._stand_in_for is not None and not self.cut.is_first:
            first = self._stand_in_for(first)
        mask, labels = inputs.get("attention_mask"), inputs.get("labels")
        if self._context is not None:
            inputs = self._context.enter(inputs)
        inputs["input_ids" if self.cut.is_first else "inputs_embeds"] = first
        if self._balance is None:
            return self._compute(inputs)
        self._balance.begin()
        output = self._compute(inputs | {"output_router_logits": False})
        extra = self._balance.take(mask, labels, first.shape[0]).to(output.device)
        if self.cut.is_last:
            return output + extra
        self._balance_losses.append(extra.detach())
        return WithLoss.apply(output, extra)

    def _compute(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self.cut.is_last:
            return self._loss(self.view, inputs)
        for name in ("labels", "shift_labels"):
            inputs.pop(name, None)
        return getattr(self.view, self._inner)(**inputs, use_cache=False).last_hidden_state

    def take_balance_losses(self) -> list[torch.Tensor]:
        """What the routers of a stage that is not the last have added to the loss since the last call."""
        losses, self._balance_losses = self._balance_losses, []
        return losses
