"""Finds the generators and counters that decide which samples come, and belong to the program of the user.

A sampler or a collator may draw from a generator of its own, which is in no checkpoint of Trainer: TRL's
`RepeatSampler` does, `WeightedRandomSampler(generator=...)`, and transformers' collators with a `seed`. A sampler may
also count its passes, or keep an order that each pass changes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from hfscale.checkpoint.program_state.kept_values import KeptValues
from hfscale.checkpoint.program_state.objects import Search, path_to
from hfscale.checkpoint.program_state.values import put_back
from hfscale.checkpoint.random_states import States, generator_state, set_generator_state
from hfscale.core.logging import get_logger

logger = get_logger(__name__)

_MAX_ORDER = 200_000
"""Numbers of a list of a sampler that are kept in a checkpoint."""


class DataState:
    """The generators and counters of a training's data loader, by the path of attributes that leads to each.

    Args:
        batch_sampler (`Any`): the batch sampler of the loader, or None.
        others (`Any`): further objects that may own generators and values: the collator and the dataset.
        apart (`Iterable[Any]`): objects that are not searched: the Trainer, and the modules of its model.
    """

    def __init__(self, batch_sampler: Any, *others: Any, apart: Iterable[Any] = ()) -> None:
        self._samplers = dict(_samplers_of(batch_sampler, "sampler"))
        search = Search(apart)
        search.enter("sampler", batch_sampler)
        search.found.holders.clear()  # what samplers count is kept as it is when a pass begins: `counters`
        for number, other in enumerate(others):
            search.enter(f"data{number}", other)
        self._generators = search.found.generators
        self._values = KeptValues(search.found.holders)
        self.iterators = tuple(search.found.iterators)
        """Where the collator and the dataset hold iterators, by the path of attributes."""
        self._first = self._numbers()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing whose state could be kept."""
        return not (self._generators or self._values.places)

    def describe_sampler(self) -> str:
        """Return the name of the class that decides the order: that of the innermost sampler."""
        found = list(self._samplers.values())
        if not found:
            return "the sampler"
        # The batch samplers of sentence-transformers call their dataset a sampler
        samplers = [each for each in found if isinstance(each, Sampler)]
        innermost = (samplers or found)[-1]
        return type(innermost).__name__

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

    def values(self) -> dict[str, Any]:
        """Return what the collator and the dataset hold that has changed since the training began, as JSON values."""
        return self._values.changed()

    def set_values(self, saved: dict[str, Any]) -> None:
        """Set what the collator and the dataset hold to earlier values; what is not named, to the first ones.

        Args:
            saved (`dict[str, Any]`): what `values` returned in another launch.
        """
        self._values.restore(saved)

    def take(self) -> Callable[[], None]:
        """Return the function that gives generators, collator and dataset the states and values that they have now."""
        generators, put_values_back = self.generators(), self._values.take()

        def put_back() -> None:
            self.set_generators(generators)
            put_values_back()

        return put_back

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
            if sampler is None or name not in vars(sampler):
                continue
            if name == "epoch" and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(value)  # it may have to draw its order again
            else:
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
            yield from _samplers_of(inner, path_to(path, name))
        if isinstance(inner, list | tuple):
            yield from _parts_of(inner, path_to(path, name))


def _parts_of(mixture: Sequence[Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the samplers in a list, and those inside them."""
    for number, part in enumerate(mixture):
        is_sampler = isinstance(part, Sampler) or path.endswith("samplers")
        if is_sampler:
            yield from _samplers_of(part, f"{path}[{number}]")


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
    """Return a JSON value as the type that the attribute has.

    A tensor, an array or a list is changed in place: others, such as the dataset, may hold the same numbers.
    """
    if isinstance(current, torch.Tensor):
        return put_back(current, torch.tensor(value, dtype=current.dtype))
    if isinstance(current, np.ndarray):
        return put_back(current, np.asarray(value, dtype=current.dtype))
    return put_back(current, list(value)) if isinstance(value, list) else value
