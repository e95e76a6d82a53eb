"""The coordinate check of μTransfer: after a few steps, the activations of each module are as large at every width."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfscale.lr_scaling.narrow_config import config_at_width
from hfscale.lr_scaling.width import initialize_at_width, split_groups
from hfscale.lr_scaling.width_rules import width_rules
from hfscale.trainer.small_model import switch_dropout_off

TOLERANCE = 0.1
"""The slope beyond which activations are not flat."""


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """How the activations of one module, in all layers, follow the width."""

    module: str
    """Name of the module; layers have `*` in the place of their number."""
    sizes: Sequence[float]
    """Mean absolute activation after the last step, by width, without unit."""
    slope: float
    """Slope of the logarithm of the size against that of the width."""
    may_shrink: bool
    """Whether it is an output, whose initial values shrink with the width, so that it must only not grow."""

    @property
    def is_flat(self) -> bool:
        """Whether the activations are as they must be at every width."""
        return self.slope <= TOLERANCE and (self.may_shrink or self.slope >= -TOLERANCE)


def coordinate_check(
    kind: type[PreTrainedModel],
    config: Any,
    rows: torch.Tensor,
    *,
    widths: Sequence[int],
    transfers: bool = True,
    rate: float = 1e-3,
    steps: int = 4,
    seeds: int = 2,
) -> list[Coordinate]:
    """Train copies of a model for a few steps at several widths, and compare the sizes of their activations.

    Args:
        kind (`type`): the class of a causal language model.
        config (`PreTrainedConfig`): its config at the largest width or above.
        rows (`torch.Tensor`): token ids (sequences, tokens) of the batch on which each step trains.
        widths (`Sequence[int]`): at least three values of `hidden_size`; the first is the base width.
        transfers (`bool`): whether the copies are initialised and trained for the base width.
        rate (`float`): the learning rate.
        steps (`int`): optimizer steps.
        seeds (`int`): copies of each width, over which activations are averaged.

    Returns:
        `list[Coordinate]`: one for each module with parameters, of all layers together.
    """
    base = widths[0]
    outputs = _outputs(kind, config_at_width(config, widths[-1]), base)
    found: list[Mapping[str, float]] = []
    for width in widths:
        runs = []
        for seed in range(seeds):
            model = _new_model(kind, config_at_width(config, width), seed)
            if transfers:
                initialize_at_width(model, base_width=base)
            runs.append(_activations(model, rows, base if transfers else None, rate, steps))
        found.append({name: sum(run[name] for run in runs) / seeds for name in runs[0]})
    return [
        Coordinate(
            module=name,
            sizes=[sizes[name] for sizes in found],
            slope=_slope(widths, [sizes[name] for sizes in found]),
            may_shrink=name in outputs,
        )
        for name in found[0]
    ]


def _new_model(kind: type[PreTrainedModel], config: Any, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    switch_dropout_off(model)
    model.train()
    return model


def _outputs(kind: type[PreTrainedModel], config: Any, base_width: int) -> set[str]:
    """Return the modules whose matrices are outputs."""
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    rules = width_rules(model, base_width)
    names = {name.rpartition(".")[0] for name, rule in rules.items() if rule.role == "output"}
    head = model.get_output_embeddings()
    names |= {name for name, module in model.named_modules() if module is head}
    # A tied head gets what the norm before it has scaled; the output of an embedding that is scaled must be flat
    embedding = model.get_input_embeddings()
    for name, module in model.named_modules():
        own = [rules.get(f"{name}.{each}") for each, _ in module.named_parameters(recurse=False)]
        is_scaled = any(
            rule is not None and rule.role == "vector" and rule.initial < 1 for rule in own
        )
        if is_scaled and module is not embedding:
            names.add(name)
    return {_without_numbers(name) for name in names}


def _activations(
    model: PreTrainedModel, rows: torch.Tensor, base_width: int | None, rate: float, steps: int
) -> Mapping[str, float]:
    """Train on one batch, and return the mean absolute output of each module afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    if base_width is not None:
        split_groups(optimizer, None, model, base_width)
    for _ in range(steps):
        model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sizes: dict[str, list[float]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            sizes.setdefault(name, []).append(float(first.float().abs().mean()))

        return hook

    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(note(_without_numbers(name)))
    with torch.no_grad():
        model(input_ids=rows, use_cache=False)
    return {name: sum(values) / len(values) for name, values in sizes.items()}


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _slope(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Return the slope of a straight line through the logarithms, by least squares."""
    x = [math.log(width) for width in widths]
    y = [math.log(max(size, 1e-30)) for size in sizes]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)
