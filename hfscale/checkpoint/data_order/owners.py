"""Finds the generators and counters that decide which samples come, and belong to the program of the user.

A sampler or a collator may draw from a generator of its own, which is in no checkpoint of Trainer: TRL's
`RepeatSampler` does, `WeightedRandomSampler(generator=...)`, and transformers' collators with a `seed`. A sampler may
also count its passes, or keep an order that each pass changes.
"""

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from hfscale.checkpoint.data_order.random_states import (
    GENERATOR_KINDS,
    States,
    generator_state,
    set_generator_state,
)
from hfscale.core.logging import get_logger

logger = get_logger(__name__)

_MAX_DEPTH = 6
_MAX_ENTRIES = 64
"""Entries of a list or dictionary that are looked at: longer ones are data."""
_MAX_ORDER = 200_000
"""Numbers of a list of a sampler that are kept in a checkpoint."""
_METHODS_THAT_READ = ("__getitem__", "__getitems__", "__iter__", "__call__")
"""Methods of datasets, samplers and collators that may draw from a generator of their module."""
_NOT_SEARCHED = (
    str,
    bytes,
    int,
    float,
    type,
    types.ModuleType,
    torch.Tensor,
    torch.nn.Module,
    np.ndarray,
)


class DataState:
    """The generators and counters of a training's data loader, by the path of attributes that leads to each.

    Args:
        batch_sampler (`Any`): the batch sampler of the loader, or None.
        others (`Any`): further objects that may own generators: the collator and the dataset.
    """

    def __init__(self, batch_sampler: Any, *others: Any) -> None:
        self._samplers = dict(_samplers_of(batch_sampler, "sampler"))
        self._generators: dict[str, Any] = {}
        searched = [("sampler", batch_sampler)]
        searched += [(f"data{number}", other) for number, other in enumerate(others)]
        seen: set[int] = set()
        for path, value in searched:
            for name, generator in _generators_of(value, path, seen):
                self._generators[name] = generator
        self._first = self._numbers()

    def describe_sampler(self) -> str:
        """Return the name of the class that decides the order: that of the innermost sampler."""
        innermost = list(self._samplers.values())[-1:]
        return type(innermost[0]).__name__ if innermost else "the sampler"

    def generators(self) -> States:
        """Return the states of the generators by path."""
        states = {path: generator_state(each) for path, each in self._generators.items()}
        return {path: state for path, state in states.items() if state is not None}

    def set_generators(self, states: States) -> None:
        """Set generators to earlier states; a path that leads to no generator any more is named in a warning.

        Args:
            states (`dict`): what `generators` returned in another launch.
        """
        for path, state in states.items():
            if path in self._generators:
                set_generator_state(self._generators[path], state)
            else:
                logger.warning(
                    "the checkpoint has the state of a random number generator of the data loader (%s), and this "
                    "launch has none there: the order of the samples may be another one",
                    path,
                )

    def counters(self) -> dict[str, Any]:
        """Return the attributes of the samplers that have changed since the training began, by path."""
        now = self._numbers()
        return {path: value for path, value in now.items() if self._first.get(path) != value}

    def set_counters(self, counters: dict[str, Any]) -> None:
        """Set attributes of the samplers to earlier values; those that it does not name, to the first ones.

        Args:
            counters (`dict`): what `counters` returned in another launch.
        """
        for path, value in (self._first | counters).items():
            owner, _, name = path.rpartition(".")
            sampler = self._samplers.get(owner)
            if sampler is not None and name in vars(sampler):
                setattr(sampler, name, _like(vars(sampler)[name], value))

    def _numbers(self) -> dict[str, Any]:
        found = {}
        for path, sampler in self._samplers.items():
            for name, value in vars(sampler).items():
                plain = _plain_numbers(value)
                if plain is not None:
                    found[f"{path}.{name}"] = plain
        return found


def _samplers_of(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the samplers inside each other, each with the path of attributes that leads to it."""
    if not hasattr(value, "__dict__"):
        return
    yield path, value
    for name, inner in vars(value).items():
        if isinstance(inner, Sampler) or (name.endswith("sampler") and inner is not None):
            yield from _samplers_of(inner, _path_to(path, name))


def _path_to(path: str, name: str) -> str:
    """Return the path of an attribute. What is only around the program's own object is left out, so that all
    strategies have the same paths: Accelerate's batch sampler on several processes, and `ParallelTrainer`'s check of
    ids."""
    return path if name in ("batch_sampler", "unchecked_collator") else f"{path}.{name}"


def _plain_numbers(value: Any) -> Any:
    """Return a number, a text or a list of numbers as a JSON value; None for everything else."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor | np.ndarray):
        is_short = value.ndim == 1 and len(value) <= _MAX_ORDER
        return value.tolist() if is_short else None
    if isinstance(value, list) and len(value) <= _MAX_ORDER:
        return list(value) if all(isinstance(entry, int | float) for entry in value) else None
    return None


def _like(current: Any, value: Any) -> Any:
    """Return a JSON value as the type that the attribute has."""
    if isinstance(current, torch.Tensor):
        return torch.tensor(value, dtype=current.dtype)
    if isinstance(current, np.ndarray):
        return np.asarray(value, dtype=current.dtype)
    # A sampler may change the list in place
    return list(value) if isinstance(value, list) else value


def _generators_of(
    value: Any, path: str, seen: set[int], depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield the generators that an object leads to, each with its path."""
    if isinstance(value, GENERATOR_KINDS):
        if id(value) not in seen:
            seen.add(id(value))
            yield path, value
        return
    if isinstance(value, _NOT_SEARCHED) or value is None or id(value) in seen:
        return
    if depth == _MAX_DEPTH:
        return
    seen.add(id(value))
    for name, inner in _parts_of(value):
        yield from _generators_of(inner, _path_to(path, name), seen, depth + 1)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object consists of and may draw with, by name."""
    if isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _variables_of(value)
    elif isinstance(value, dict):
        yield from ((str(key), value[key]) for key in list(value)[:_MAX_ENTRIES])
    elif isinstance(value, list | tuple):
        yield from ((str(number), entry) for number, entry in enumerate(value[:_MAX_ENTRIES]))
    elif hasattr(value, "__dict__"):
        yield from vars(value).items()
        for name in _METHODS_THAT_READ:
            method = getattr(type(value), name, None)
            if isinstance(method, types.FunctionType):
                yield name, method


def _variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function uses and does not make itself: defaults, closure and globals."""
    for number, default in enumerate(function.__defaults__ or ()):
        yield f"default{number}", default
    yield from (function.__kwdefaults__ or {}).items()
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    for name in function.__code__.co_names:
        # Other globals would lead through whole programs
        if isinstance(function.__globals__.get(name), GENERATOR_KINDS):
            yield name, function.__globals__[name]
