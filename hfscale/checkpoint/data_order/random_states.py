"""Reads and sets the states of random number generators, as JSON values.

The global generators are those of torch (CPU), NumPy and Python. What a GPU draws has no part in the reading of data.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

GLOBAL_GENERATORS = ("torch", "numpy", "python")
States = dict[str, Any]
"""State by the name of a generator."""
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
GENERATOR_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def global_states() -> States:
    """Return the states of the global generators by their names."""
    return {
        "torch": _of_torch(torch.get_rng_state()),
        "numpy": _of_numpy(np.random.get_state()),
        "python": random.getstate(),
    }


def set_global_states(states: Mapping[str, Any]) -> None:
    """Set global generators to earlier states.

    Args:
        states (`Mapping[str, Any]`): what `global_states` returned, or a part of it; other names are ignored.
    """
    if "torch" in states:
        torch.set_rng_state(_to_torch(states["torch"]))
    if "numpy" in states:
        np.random.set_state(_to_numpy(states["numpy"]))
    if "python" in states:
        random.setstate(_to_python(states["python"]))


def generator_state(generator: Generator) -> Any:
    """Return the state of a generator that is an object; None if it has no state that can be kept: on a
    GPU, or drawing from the operating system.

    Args:
        generator (`Generator`): a generator of torch, NumPy or Python.
    """
    if isinstance(generator, torch.Generator):
        return _of_torch(generator.get_state()) if generator.device.type == "cpu" else None
    if isinstance(generator, np.random.RandomState):
        return _of_numpy(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, random.SystemRandom):
        return None
    return generator.getstate()


def set_generator_state(generator: Generator, state: Any) -> None:
    """Set a generator to an earlier state.

    Args:
        generator (`Generator`): a generator of torch, NumPy or Python.
        state (`Any`): what `generator_state` returned for one of the same kind.
    """
    if isinstance(generator, torch.Generator):
        generator.set_state(_to_torch(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_to_numpy(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)
    else:
        generator.setstate(_to_python(state))


def _of_torch(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _to_torch(state: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)


def _of_numpy(state: Any) -> list[Any]:
    name, keys, *others = state  # a tuple: the dictionary is made for legacy=False only
    return [name, keys.tobytes().hex(), *others]


def _to_numpy(state: Any) -> tuple[Any, ...]:
    name, keys, *others = state
    return (name, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), *others)


def _to_python(state: Any) -> tuple[Any, ...]:
    version, numbers, gauss = state
    return (version, tuple(numbers), gauss)


def _plain(value: Any) -> Any:
    """Return the state of a bit generator of NumPy with its arrays as JSON values."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "bytes": value.tobytes().hex()}
    return value.item() if isinstance(value, np.generic) else value


def _arrays(value: Any) -> Any:
    """Return what `_plain` has been given."""
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "bytes"}:
        return np.frombuffer(bytes.fromhex(value["bytes"]), dtype=value["dtype"])
    return {key: _arrays(entry) for key, entry in value.items()}
