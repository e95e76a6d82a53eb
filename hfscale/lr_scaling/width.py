"""μTransfer: initial values and learning rates with which the best learning rate of a narrow model holds at any width.

The forward pass is not changed, so that checkpoints load everywhere. `hfscale.lr_scaling.width_rules` has the rules.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from transformers import PreTrainedModel

from hfscale.core import distributed
from hfscale.core.options import names_of
from hfscale.core.spelling import spelled
from hfscale.core.versions import is_fsdp_enabled
from hfscale.errors import ParameterError, UsageError
from hfscale.lr_scaling.narrow_config import config_at_width
from hfscale.lr_scaling.options import LRScalingOptions
from hfscale.lr_scaling.width_probes import scale_values
from hfscale.lr_scaling.width_rules import (
    KEY,
    WidthRule,
    check_family,
    plain_config,
    width_rules,
)
from hfscale.trainer.strategies.tensors import full_shape, is_distributed_tensor

_split: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""The base width for which the groups of an optimizer have been split: it can take part in several trainings."""


# ---- initial values


def initialize_at_width(model: PreTrainedModel, *, base_width: int) -> None:
    """Rescale the initial values of a model so that learning rates tuned at `base_width` hold for it.

    Call it on every rank for a model that was just made from its config, before a Trainer gets it, and train with
    `LRScalingCallback(base_width=...)`, which scales the learning rates. The width is noted as `hfscale_base_width` in
    the model's config, and so in `config.json`.

    Args:
        model (`PreTrainedModel`): a causal language model with initial values; changed in place.
        base_width (`int`): the `hidden_size` at which the learning rate was tuned. A copy of this width, with fewer
            heads of the same size, must exist: `hfscale lr` makes it.

    Raises:
        UsageError: the model has trained weights or was initialised for a width before, its sizes cannot be divided to
            this width, or the rules for its family are not known.
    """
    check_family(model)
    noted = getattr(model.config, KEY, None)
    if noted is not None:
        raise UsageError(
            f"the config of the model notes a base width of {noted}: it was initialised before, or shares the object "
            "with a model that was; make config and model again"
        )
    rules = width_rules(model, base_width)
    _check_is_new(model, base_width)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rule = rules[name]
            if rule.initial == 1:
                continue
            with _complete(parameter):
                scale_values(parameter.data, rule.initial, adds_one=rule.adds_one)
    setattr(model.config, KEY, base_width)


@torch.no_grad()
def _check_is_new(model: PreTrainedModel, base_width: int) -> None:
    """Refuse a model whose values are not those that are drawn for a new model, at the base width too.

    What all new models of a family have equal, such as the 1 of norms, must be equal, and what is drawn must have the
    standard deviation of a narrow copy: an initialisation that depends on the width would be scaled twice.
    """
    if any(getattr(each, "_is_hf_initialized", False) for each in model.parameters()):
        raise UsageError(
            "the model was loaded from a checkpoint: initialize_at_width is for a new one, made from its config"
        )
    if is_fsdp_enabled() and distributed.rank() > 0:
        return  # its values may be those that rank 0 will send
    with torch.random.fork_rng(devices=[]):
        drawn = type(model)(config_at_width(plain_config(model), base_width))
    expected = dict(drawn.named_parameters())
    for name, parameter in model.named_parameters():
        if is_distributed_tensor(parameter):
            raise UsageError(
                f"{name} is sharded already: call initialize_at_width before a mesh shards the model"
            )
        with _complete(parameter):
            problem = _why_not_drawn(parameter.data, expected[name].data)
        if problem is not None:
            raise UsageError(
                f"{name} {problem}: initialize_at_width is for a model that was just made from its config, by a rule "
                "that does not depend on the width"
            )


def _why_not_drawn(values: torch.Tensor, drawn: torch.Tensor) -> str | None:
    """Return why the values of a parameter cannot come from the rule that drew others; None if they can."""
    if bool((drawn == drawn.flatten()[0]).all()):
        constant = float(drawn.flatten()[0])
        return None if bool((values == constant).all()) else f"is not {constant:g} everywhere"
    found, wanted = float(values.float().std()), float(drawn.float().std())
    # The standard deviation of that of n normal numbers is 1 / sqrt(2 n); six of them
    tolerance = 6 * math.sqrt(0.5 / values.numel() + 0.5 / drawn.numel())
    if abs(found / wanted - 1) <= tolerance:
        return None
    return f"has a standard deviation of {found:.3g}, and {wanted:.3g} in a new narrow copy"


@contextlib.contextmanager
def _complete(parameter: nn.Parameter) -> Iterator[None]:
    """Inside this context, a parameter that ZeRO-3 keeps in shards is complete; changes on rank 0 are kept."""
    if full_shape(parameter) == parameter.shape:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        yield


# ---- learning rates


def check_width(model: nn.Module, base_width: int) -> None:
    """Check that a model was initialised for a base width.

    Args:
        model (`nn.Module`): the model without wrappers.
        base_width (`int`): the option.

    Raises:
        UsageError: it was not.
    """
    check_family(model)
    config: Any = model.config
    width = getattr(config, KEY, None)
    if width != base_width:
        named = spelled("base_width", base_width)
        was = "for no width" if width is None else f"for {width}"
        raise UsageError(
            f"{named}: the model was initialised {was}; make it from its config and call "
            f"hfscale.initialize_at_width(model, base_width={base_width})"
        )


def split_groups(optimizer: Any, scheduler: Any, model: nn.Module, base_width: int) -> None:
    """Split the groups of an optimizer by the factor on the learning rate, and scale their rates.

    AdamW decays weights by rate x decay: where the rate is divided, the decay is multiplied, so that this is kept.

    Args:
        optimizer (`torch.optim.Optimizer`): an optimizer that has just been made; changed in place, once.
        scheduler (`torch.optim.lr_scheduler.LRScheduler`, *optional*): a scheduler that exists already.
        model (`nn.Module`): the model without wrappers, whose parameters the optimizer has.
        base_width (`int`): the `hidden_size` at which the learning rate was tuned.

    Raises:
        UsageError: the optimizer is not Adam or AdamW of torch, its scheduler was made before, or it has parameters of
            another model.
    """
    if _split.get(optimizer) == base_width:
        return
    if type(optimizer) not in (Adam, AdamW):
        raise _refused(
            base_width,
            f"it is known for torch's AdamW and Adam, not for {type(optimizer).__name__}: use --optim adamw_torch",
        )
    if optimizer in _split or scheduler is not None:
        raise _refused(base_width, "give the Trainer a new optimizer and no scheduler")
    rules = width_rules(model, base_width)
    by_parameter = {id(parameter): rules[name] for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        groups += _parts(group, by_parameter, base_width)
    optimizer.param_groups[:] = groups
    _split[optimizer] = base_width


def _parts(
    group: Mapping[str, Any], rules: Mapping[int, WidthRule], base_width: int
) -> list[dict[str, Any]]:
    """Return one group for each factor on the rate. The largest factor is first: Trainer logs the first group's."""
    by_factor: dict[float, list[int]] = {}
    for place, parameter in enumerate(group["params"]):
        rule = rules.get(id(parameter))
        if rule is None:
            shape = " x ".join(map(str, parameter.shape))
            raise _refused(base_width, f"the optimizer has a parameter ({shape}) of no known role")
        if rule.adds_one and group["weight_decay"]:
            raise _refused(
                base_width,
                "the norm before the head decays to a gain of 1: leave norms out of the weight decay, as Trainer does",
            )
        by_factor.setdefault(rule.rate, []).append(place)
    if len(by_factor) == 0:
        return [dict(group)]
    parts = []
    for factor in sorted(by_factor, reverse=True):
        part = dict(group)
        for key in ("params", "param_names"):
            if key in group:
                part[key] = [group[key][place] for place in by_factor[factor]]
        part["lr"] = group["lr"] * factor
        if group["weight_decay"] and factor != 1:
            if not group.get("decoupled_weight_decay"):
                raise _refused(
                    base_width, "Adam adds the weight decay to gradients: use AdamW, or no decay"
                )
            part["weight_decay"] = group["weight_decay"] / factor
        parts.append(part)
    return parts


def _refused(base_width: int, rule: str) -> ParameterError:
    with names_of(LRScalingOptions):
        return ParameterError("base_width", base_width, rule)
