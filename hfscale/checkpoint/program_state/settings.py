"""Settings of a library's objects that a program may change while it trains, and parts that it may replace.

Settings are which parameters train, the rates of dropout, the limits and factors of modules, and those of a Trainer,
its arguments and a collator: a callback may set them once, as it unfreezes layers at a step. Only fractions of modules
and Trainers count, since libraries count their own calls in integers. `KeptValues` keeps those that have changed since
training began. Parts are modules and the functions that a Trainer calls, which no checkpoint can keep.
"""

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Trainer

from hfscale.checkpoint.program_state.objects import (
    Holder,
    is_of_program,
    names_of_program,
    stored_names,
)

_HOOKS_OF_MODULES = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_HOOKS_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = (types.FunctionType, types.MethodType)
_TRAINS = "requires_grad"
_FUNCTIONS = ("compute_loss_func", "data_collator", "label_smoother")
"""Attributes of a Trainer that each step uses."""


@dataclass(frozen=True)
class _Setting:
    """One setting: the object that has it, and the attribute."""

    owner: Any
    name: str


def settings_of(trainer: Trainer, model: torch.nn.Module) -> dict[str, Holder]:
    """Return the places of the settings, by path.

    Args:
        trainer (`Trainer`): the Trainer that trains.
        model (`nn.Module`): its model, without what an engine has put around it.
    """

    def find_of_trainer() -> dict[str, _Setting]:
        return _fractions_of(trainer, apart=_names_of_trainer())

    def find_of_arguments() -> dict[str, _Setting]:
        return _fractions_of(trainer.args)

    places = {}
    places["model.settings"] = _place(functools.partial(_of_model, model))
    places["trainer.settings"] = _place(find_of_trainer)
    places["trainer.args"] = _place(find_of_arguments)
    for name in ("data_collator", "label_smoother"):
        part = getattr(trainer, name, None)
        if part is None or is_of_program(part):
            continue
        places[f"trainer.{name}"] = _place(functools.partial(_numbers_of, part))
    return places


def _place(find: Callable[[], dict[str, _Setting]]) -> Holder:
    found: dict[str, _Setting] = {}
    """Of the last reading, so that writing many settings does not search the model for each."""

    def read() -> dict[str, Any]:
        found.clear()
        found.update(find())
        return {name: getattr(each.owner, each.name) for name, each in found.items()}

    def write(name: str, value: Any) -> None:
        each = found.get(name)
        # A program that makes another model has other names, for its weights too
        if each is not None:
            setattr(each.owner, each.name, value)

    return Holder(read, write)


def _of_model(model: torch.nn.Module) -> dict[str, _Setting]:
    found: dict[str, _Setting] = {}
    config = getattr(model, "config", None)
    for name, each in _fractions_of(config).items():
        found[f"config.{name}"] = each
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, each in _fractions_of(module).items():
            found[f"{prefix}{name}"] = each
    for name, parameter in model.named_parameters():
        found[f"{name}.{_TRAINS}"] = _Setting(parameter, _TRAINS)
    return found


def _fractions_of(value: Any, *, apart: frozenset[str] = frozenset()) -> dict[str, _Setting]:
    """Return the attributes of an object that are a fraction or, as PEFT's `scaling`, fractions by name.

    Those that the program's own classes assign are found as such (`Search`).
    """
    kind: Any = type(value)
    if is_of_program(value):
        apart |= names_of_program(kind)
    found = {}
    for name, inner in getattr(value, "__dict__", {}).items():
        if _is_fraction(inner) and name not in apart:
            found[name] = _Setting(value, name)
    return found


def _is_fraction(value: Any) -> bool:
    if type(value) is not dict:
        return isinstance(value, float)
    return bool(value) and all(isinstance(each, float) for each in value.values())


def _numbers_of(value: Any) -> dict[str, _Setting]:
    """Return the numbers of a collator: that of a library counts nothing."""
    found = {}
    for name, inner in getattr(value, "__dict__", {}).items():
        if isinstance(inner, int | float):
            found[name] = _Setting(value, name)
    return found


@functools.cache
def _names_of_trainer() -> frozenset[str]:
    """Return the attributes that Trainer itself assigns, such as the sum of its losses."""
    found = frozenset[str]()
    for method in vars(Trainer).values():
        if isinstance(method, types.FunctionType):
            found |= stored_names(method.__code__, "STORE_ATTR")
    return found


def hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the user's functions that are called around the passes of a module, in their order.

    So are those of its parameters, when they get a gradient. Those of libraries do not count, as each strategy has
    others.

    Args:
        module (`nn.Module`): the module.
    """
    tables = [getattr(module, kind) for kind in _HOOKS_OF_MODULES]
    for parameter in module.parameters(recurse=False):
        for kind in _HOOKS_OF_PARAMETERS:
            tables.append(getattr(parameter, kind, None))
    for hooks in tables:
        if not hooks:
            continue
        for hook in hooks.values():
            function = getattr(hook, "func", hook)  # of a partial
            function = getattr(function, "__func__", function)
            if is_of_program(function):
                yield hook


def parts_of(trainer: Trainer, model: torch.nn.Module) -> dict[str, Any]:
    """Return what tells that a part has been replaced or added, by path.

    Parts are the class of each module, the program's functions that are its hooks or replace its methods, the
    functions of the Trainer, and the adapter that trains.

    Args:
        trainer (`Trainer`): the Trainer that trains.
        model (`nn.Module`): its model, without what an engine has put around it.
    """
    found: dict[str, Any] = {}
    for name in _FUNCTIONS:
        found[f"trainer.{name}"] = getattr(trainer, name, None)
    for path, module in model.named_modules():
        place = f"model.{path}" if path else "model"
        found[place] = type(module)
        number = len(list(hooks_of(module)))
        if number:
            found[f"hooks of {place}"] = number
        for name, value in vars(module).items():
            function = getattr(value, "__func__", value)
            if isinstance(value, _METHODS) and is_of_program(function):
                found[f"{place}.{name}"] = value
    adapter = getattr(model, "active_adapter", None)
    if isinstance(adapter, str):
        found["the active adapter"] = adapter
    return found


def replaced(first: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the paths of parts that were replaced, added or removed, in alphabetical order.

    Args:
        first (`dict[str, Any]`): what `parts_of` returned earlier.
        now (`dict[str, Any]`): what it returns now.
    """
    paths = []
    for path in sorted({*first, *now}):
        if not _is_same(first.get(path), now.get(path)):
            paths.append(path)
    return paths


def _is_same(first: Any, now: Any) -> bool:
    """Whether two parts are the same: two collators may have the same numbers."""
    if isinstance(first, str | int):
        return bool(first == now)
    return first is now
