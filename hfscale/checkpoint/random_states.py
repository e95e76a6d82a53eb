"""Reads and sets the states of random number generators; `plain` makes JSON values of them.

The global generators are those of torch (CPU), NumPy and Python. What a GPU draws has no part in the reading of data.
A state is what its library returns, so that it can be read before each batch: it costs some 10 µs, and no conversion.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

States = dict[str, Any]
"""State by the name of a generator."""
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
GENERATOR_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def global_states() -> States:
    """Return the states of the global generators by their names: `torch`, `numpy`, `python`."""
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_global_states(states: Mapping[str, Any]) -> None:
    """Set global generators to earlier states.

    Args:
        states (`Mapping[str, Any]`): what `global_states` returned, or a part of it, as JSON values or not.
    """
    restored = {name: restore(_renewed(name, state)) for name, state in states.items()}
    if "torch" in restored:
        torch.set_rng_state(restored["torch"])
    if "numpy" in restored:
        np.random.set_state(restored["numpy"])
    if "python" in restored:
        random.setstate(restored["python"])


def check_global_states(states: Mapping[str, Any]) -> None:
    """Check that states of the global generators can be set, on generators that nothing draws from.

    Args:
        states (`Mapping[str, Any]`): JSON values from a file.

    Raises:
        ValueError: a state is not one of its generator.
    """
    checked: dict[str, Generator] = {
        "torch": torch.Generator(),
        "numpy": np.random.RandomState(0),
        "python": random.Random(0),  # noqa: S311 - for the order of data, not for cryptography
    }
    for name, state in states.items():
        try:
            set_generator_state(checked[name], state)
        except Exception as error:  # each library raises errors of its own
            raise ValueError(f"the state of the generator of {name} is broken") from error


def _renewed(name: str, state: Any) -> Any:
    """Return a state of a global generator as `plain` writes it, also that of an earlier version of hfscale."""
    if name == "torch" and isinstance(state, str):
        return {"tensor": state}
    if name == "numpy" and isinstance(state, list):
        kind, keys, *others = state
        return {"tuple": [kind, {"dtype": "<u4", "array": keys}, *others]}
    if name == "python" and isinstance(state, list):
        version, numbers, gauss = state
        return {"tuple": [version, {"tuple": numbers}, gauss]}
    return state


def generator_state(generator: Generator) -> Any:
    """Return the state of a generator that is an object; None if it has no state that can be kept.

    Those have none that are on a GPU, or draw from the operating system.

    Args:
        generator (`Generator`): a generator of torch, NumPy or Python.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state() if generator.device.type == "cpu" else None
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.SystemRandom):
        return None
    return generator.getstate()


def set_generator_state(generator: Generator, state: Any) -> None:
    """Set a generator to an earlier state.

    Args:
        generator (`Generator`): a generator of torch, NumPy or Python.
        state (`Any`): what `generator_state` returned for one of the same kind, as JSON values or not.
    """
    restored = restore(state)
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(restored)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = restored
    else:
        generator.setstate(restored)


def plain(state: Any) -> Any:
    """Return states as JSON values.

    Args:
        state (`Any`): a state, or dictionaries of states.
    """
    if isinstance(state, torch.Tensor):
        return {"tensor": bytes(state.tolist()).hex()}
    if isinstance(state, np.ndarray):
        return {"dtype": state.dtype.str, "array": state.tobytes().hex()}
    if isinstance(state, dict):
        return {key: plain(entry) for key, entry in state.items()}
    if isinstance(state, tuple | list):
        return {"tuple": [plain(entry) for entry in state]}
    return state.item() if isinstance(state, np.generic) else state


def restore(state: Any) -> Any:
    """Return what `plain` has been given; states that are no JSON values are returned as they are.

    Args:
        state (`Any`): JSON values.
    """
    if not isinstance(state, dict):
        return state
    if state.keys() == {"tensor"}:
        return torch.frombuffer(bytearray.fromhex(state["tensor"]), dtype=torch.uint8)
    if state.keys() == {"dtype", "array"}:
        return np.frombuffer(bytes.fromhex(state["array"]), dtype=state["dtype"])
    if state.keys() == {"tuple"}:
        return tuple(restore(entry) for entry in state["tuple"])
    return {key: restore(entry) for key, entry in state.items()}
