"""Values that can be kept in a checkpoint: numbers, and small collections of numbers, as JSON and back.

Text is none of them: it often is a path or a name that another launch has another one of.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MOST_NUMBERS = 4096
"""Numbers of a collection, a tensor or an array that is kept: larger ones are data."""

_NUMBERS = (bool, int, float, type(None))
_TENSOR_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
_ARRAY_KINDS = "biuf"


_MARKED = 64


class _Nothing:
    """The type of `NOTHING`."""


NOTHING = _Nothing()
"""Stands for a value that cannot be kept, and for an attribute that is not there."""
_TOO_MANY = NOTHING, MOST_NUMBERS + 1


def kept(value: Any) -> Any:
    """Return a copy of a value that nothing else changes, or `NOTHING` if it cannot be kept.

    Args:
        value (`Any`): a number, None, or up to `MOST_NUMBERS` numbers in tensors, arrays, lists, tuples, deques, and
            dictionaries with texts or integers as keys, which may be in each other.
    """
    copied, numbers = _copied(value, 0)
    return copied if numbers <= MOST_NUMBERS else NOTHING


def _copied(value: Any, numbers: int) -> tuple[Any, int]:
    """Return a copy and how many numbers there are with it; more than `MOST_NUMBERS` if it cannot be kept."""
    if isinstance(value, _NUMBERS):
        return value, numbers + 1
    if is_tensor(value):
        known = value.dtype in _TENSOR_TYPES.values() and value.layout == torch.strided
        is_kept = known and numbers + value.numel() <= MOST_NUMBERS
        return (value.detach().clone(), numbers + value.numel()) if is_kept else _TOO_MANY
    if isinstance(value, np.generic | np.ndarray):
        is_kept = value.dtype.kind in _ARRAY_KINDS and numbers + value.size <= MOST_NUMBERS
        return (value.copy(), numbers + value.size) if is_kept else _TOO_MANY
    if type(value) not in (list, tuple, deque, dict) or numbers + len(value) > MOST_NUMBERS:
        return _TOO_MANY
    if type(value) is dict and not all(isinstance(key, str | int) for key in value):
        return _TOO_MANY
    entries = []
    for entry in value.values() if type(value) is dict else value:
        copied, numbers = _copied(entry, numbers)
        if numbers > MOST_NUMBERS:
            return _TOO_MANY
        entries.append(copied)
    if type(value) is dict:
        return dict(zip(value, entries, strict=True)), numbers
    return (deque(entries, value.maxlen) if type(value) is deque else type(value)(entries)), numbers


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of torch's own classes: others may be sharded or quantised."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def are_equal(left: Any, right: Any) -> bool:
    """Return whether two values that `kept` has returned are the same, bit by bit."""
    return type(left) is type(right) and to_json(left) == to_json(right)


def is_unchanged(first: Any, value: Any) -> bool:
    """Return whether a value is very likely what it was, at less cost than to copy and compare it; False if unsure.

    Args:
        first (`Any`): what `kept` has returned.
        value (`Any`): the value now.
    """
    if type(first) is not type(value):
        return False
    try:
        if isinstance(value, torch.Tensor):
            return first.dtype == value.dtype and torch.equal(first, value)
        if isinstance(value, np.ndarray):
            return first.dtype == value.dtype and np.array_equal(first, value)
        return bool(first == value)
    except (RuntimeError, ValueError):  # tensors or arrays in collections have no single answer
        return False


def to_json(value: Any) -> Any:
    """Return what `kept` has returned as JSON values."""
    if isinstance(value, float):
        return {"float": value.hex()}  # also those that JSON has no word for
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, torch.Tensor):
        content = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": name, "shape": list(value.shape), "bytes": content}
    if isinstance(value, np.generic | np.ndarray):
        content = value.tobytes().hex()
        return {"array": value.dtype.str, "shape": list(value.shape), "bytes": content}
    if isinstance(value, dict):
        return {"dict": [[key, to_json(entry)] for key, entry in value.items()]}
    return {type(value).__name__: [to_json(entry) for entry in value]}


def from_json(saved: Any) -> Any:
    """Return what `to_json` has been given. A number of NumPy comes back as an array without dimensions.

    Args:
        saved (`Any`): JSON values, from a file that may be broken.

    Raises:
        ValueError: it is nothing that `to_json` writes.
    """
    if isinstance(saved, bool | int | type(None)):
        return saved
    if not isinstance(saved, dict) or not saved:
        raise ValueError("it is no kept value")
    kind = next(iter(saved))
    read = _READERS.get(kind)
    if read is None:
        raise ValueError(f"there is no kept value of the kind {kind}")
    try:
        return read(saved)
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"a kept value of the kind {kind} is broken") from error


def _tensor(saved: dict[str, Any]) -> torch.Tensor:
    content = bytearray.fromhex(saved["bytes"])
    flat = (
        torch.frombuffer(content, dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8)
    )
    return flat.view(_TENSOR_TYPES[saved["tensor"]]).reshape(saved["shape"])


def _array(saved: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(str(saved["array"]))
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"there is no kept array of the type {saved['array']}")
    return np.frombuffer(bytes.fromhex(saved["bytes"]), dtype=dtype).reshape(saved["shape"]).copy()


_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda saved: float.fromhex(saved["float"]),
    "list": lambda saved: [from_json(entry) for entry in saved["list"]],
    "tuple": lambda saved: tuple(from_json(entry) for entry in saved["tuple"]),
    "deque": lambda saved: deque(from_json(entry) for entry in saved["deque"]),
    "dict": lambda saved: {key: from_json(entry) for key, entry in saved["dict"]},
    "tensor": _tensor,
    "array": _array,
}


def mark_of(value: Any) -> float | None:
    """Return a number that very likely changes when a large tensor or array does; None for everything else."""
    if is_tensor(value) and value.is_floating_point() and value.device.type != "meta":
        flat = value.detach().reshape(-1)
        return float(flat[:_MARKED].double().sum() + flat[-_MARKED:].double().sum())
    if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
        flat = value.reshape(-1)
        return float(flat[:_MARKED].sum()) + float(flat[-_MARKED:].sum())
    return None


def put_back(current: Any, value: Any) -> Any:
    """Return what an attribute has to be so that it has an earlier value.

    A collection, tensor or array that is there is changed in place, since others may hold it too.

    Args:
        current (`Any`): what the attribute is now; `NOTHING` if it is not there.
        value (`Any`): the earlier value, from `kept` or `from_json`.
    """
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        if current.shape == value.shape and current.dtype == value.dtype:
            current.detach().copy_(value)
            return current
        return value.clone().to(current.device)
    if isinstance(current, np.generic) and isinstance(value, np.ndarray) and not value.shape:
        return value[()]
    if isinstance(current, np.ndarray) and isinstance(value, np.ndarray):
        if (
            current.shape == value.shape
            and current.dtype == value.dtype
            and current.flags.writeable
        ):
            current[...] = value
            return current
        return value.copy()
    if isinstance(value, np.ndarray) and not value.shape:
        return value[()]
    if isinstance(value, list | deque) and type(current) is type(value):
        current.clear()
        current.extend(value)
        return current
    if isinstance(value, dict) and isinstance(current, dict):
        current.clear()
        current.update(value)
        return current
    return kept(value)
