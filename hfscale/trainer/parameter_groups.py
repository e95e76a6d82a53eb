"""The options of an optimizer's parameter groups, and the state of its scheduler for each of them.

A scheduler keeps lists with one entry for each of its optimizer's groups, such as `base_lrs`. Another layout or
strategy may have other groups, and each of them needs the entries that its parameters had.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

_PLAIN_TYPES = (bool, int, float, str, type(None))
OF_THE_LAUNCH = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that say how it computes, which a checkpoint does not decide."""
NAMES = ("params", "param_names")
"""Entries of a group that say which parameters it has."""
BY_GROUP = frozenset(
    {
        "base_lrs",
        "_last_lr",
        "_init_lrs",
        "lr_lambdas",
        "min_lrs",
        "max_lrs",
        "base_momentums",
        "max_momentums",
    }
)
"""Lists with one entry per group, of the schedulers of torch and transformers: test_parameter_groups.py tries them."""
_PARTS = "_schedulers"
"""Under it `SequentialLR` and `ChainedScheduler` keep the states of the schedulers that they consist of."""
_OTHERS = frozenset({"_schedule_phases", "_milestones", _PARTS})
"""Lists of these schedulers that have nothing to do with the groups, and may have as many entries."""


def _is_by_group(key: str, value: Any, groups: int) -> bool:
    return isinstance(value, list) and len(value) == groups and key not in _OTHERS


def entries_by_group(state: Mapping[str, Any], groups: int) -> list[dict[str, Any]]:
    """Return what a scheduler keeps for each parameter group.

    Args:
        state (`Mapping[str, Any]`): its `state_dict()`.
        groups (`int`): the number of groups of its optimizer.

    Returns:
        `list[dict[str, Any]]`: for each group, the entries by the name of their list. Names of lists of a part of the
            scheduler begin with its number: `_schedulers.0.base_lrs`.
    """
    found: list[dict[str, Any]] = [{} for _ in range(groups)]
    for key, value in state.items():
        if _is_by_group(key, value, groups):
            for entries, entry in zip(found, value, strict=True):
                entries[key] = entry
        for number, part in _parts(key, value):
            for entries, of_part in zip(found, entries_by_group(part, groups), strict=True):
                entries.update({f"{_PARTS}.{number}.{name}": v for name, v in of_part.items()})
    return found


def with_group_entries(
    state: Mapping[str, Any], groups: int, entries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the state of a scheduler whose lists by group have other entries.

    Args:
        state (`Mapping[str, Any]`): the `state_dict()` of a scheduler.
        groups (`int`): the number of groups that it has.
        entries (`Sequence[Mapping[str, Any]]`): for each group of the result, as `entries_by_group` returns them.
    """
    fitted: dict[str, Any] = {}
    for key, value in state.items():
        fitted[key] = value
        if _is_by_group(key, value, groups):
            fitted[key] = [of_group[key] for of_group in entries]
        parts = list(_parts(key, value))
        if parts:
            fitted[key] = [
                with_group_entries(part, groups, _of_part(entries, number))
                for number, part in parts
            ]
    return fitted


def with_entries(state: Mapping[str, Any], groups: int, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the state of a scheduler for other groups, each of which gets the entries of one of its own.

    Args:
        state (`Mapping[str, Any]`): the `state_dict()` of a scheduler.
        groups (`int`): the number of groups that it has.
        numbers (`Sequence[int]`): for each group of the result, the number of the group whose entries it gets.
    """
    entries = entries_by_group(state, groups)
    return with_group_entries(state, groups, [entries[number] for number in numbers])


def group_count(state: Mapping[str, Any]) -> int | None:
    """Return the number of groups that the state of a scheduler has entries for; None if it has none.

    Args:
        state (`Mapping[str, Any]`): its `state_dict()`.
    """
    for key, value in state.items():
        if key in BY_GROUP and isinstance(value, list):
            return len(value)
    return None


def unknown_list(state: Mapping[str, Any], groups: int) -> str | None:
    """Return a list that may have an entry per group or not, so that it cannot be given to other groups.

    Args:
        state (`Mapping[str, Any]`): the `state_dict()` of a scheduler.
        groups (`int`): the number of groups of its optimizer.

    Returns:
        `str` or `None`: the name of the first one; None if there is none.
    """
    for key, value in state.items():
        may_be_by_group = isinstance(value, list | tuple) and len(value) == groups
        if may_be_by_group and key not in BY_GROUP and key not in _OTHERS:
            return key
        for _, part in _parts(key, value):
            found = unknown_list(part, groups)
            if found is not None:
                return found
    return None


def _parts(key: str, value: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the states of the schedulers that one consists of, with their numbers."""
    if key == _PARTS and isinstance(value, list | tuple):
        for number, part in enumerate(value):
            if isinstance(part, Mapping):
                yield number, part


def _of_part(entries: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    prefix = f"{_PARTS}.{number}."
    return [
        {
            name.removeprefix(prefix): value
            for name, value in of_group.items()
            if name.startswith(prefix)
        }
        for of_group in entries
    ]


def plain(value: Any) -> Any:
    """Return a value with Python's numbers in the place of NumPy's and of tensors of one element, in any depth.

    Args:
        value (`Any`): an option of an optimizer, or the state of a scheduler.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(entry) for key, entry in value.items()}
    return value


def packed_state(state: Mapping[str, Any]) -> bytes:
    """Return the content of scheduler.pt.

    Args:
        state (`Mapping[str, Any]`): the `state_dict()` of a scheduler.
    """
    buffer = io.BytesIO()
    torch.save(plain(dict(state)), buffer)
    return buffer.getvalue()


def is_storable(value: Any) -> bool:
    """Return whether the value of an optimizer's option can be stored in `hfscale_parallel.json`.

    Args:
        value (`Any`): a number, a text, None, or lists and dictionaries of these.
    """
    value = plain(value)
    if isinstance(value, list | tuple):
        return all(map(is_storable, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_storable, value.values()))
    return isinstance(value, _PLAIN_TYPES)


def restore_options(group: dict[str, Any], stored: Mapping[str, Any], *, adds: bool) -> None:
    """Give a group the options of a stored one, each in the type that it has in the group.

    Args:
        group (`dict[str, Any]`): one of an optimizer's `param_groups`; changed in place.
        stored (`Mapping[str, Any]`): the options that were stored.
        adds (`bool`): whether it also gets options that it does not have yet, such as one that a step adds.
    """
    for key, value in stored.items():
        if key in NAMES or key in OF_THE_LAUNCH:
            continue
        if key in group:
            group[key] = _in_type_of(group[key], value)
        elif adds:
            group[key] = value


def _in_type_of(own: Any, value: Any) -> Any:
    if isinstance(own, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(own, value)
    if isinstance(own, np.generic):
        return type(own)(value)
    if isinstance(own, list) and isinstance(value, tuple):
        return list(value)
    return value
