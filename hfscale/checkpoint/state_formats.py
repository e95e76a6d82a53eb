"""Loads the states of an optimizer in the formats in which they were saved.

`torch.optim.Optimizer.load_state_dict` converts each state to the format of its parameter. Optimizers that keep states
in another one, as transformers' Adafactor keeps float32 beside bfloat16 parameters, would go on with rounded states.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.best import STATE_NAME
from hfscale.core.text_files import read_json
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import saved_state, saved_state_of
from hfscale.trainer.strategies import Strategy

_NAME = "optimizer"
_FORMATS = "formats"
_HOOKS = "_optimizer_load_state_dict_pre_hooks"


def note_formats(adapter: TrainerAdapter) -> None:
    """Have every later checkpoint say in which formats the parameters are that the optimizer steps.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
    """
    trainer = adapter.trainer
    optimizer = Strategy.of(trainer).torch_optimizer()
    saved_state(trainer.state, _NAME)[_FORMATS] = sorted(_formats_of(optimizer))


@contextmanager
def states_in_saved_formats(adapter: TrainerAdapter) -> Iterator[None]:
    """Within the context, let the optimizer load the states of the checkpoint in their own formats.

    Nothing is changed where the parameters had other formats when the checkpoint was saved: then the states follow the
    parameters, as torch has it. Nor is it in checkpoints of older versions, which do not say so.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer that resumes, and has its optimizer.
    """
    optimizer: Any = Strategy.of(adapter.trainer).torch_optimizer()
    is_listened_to = isinstance(optimizer, torch.optim.Optimizer)
    if not is_listened_to or not _has_saved_formats(adapter, optimizer):
        yield
        return
    with ExitStack() as hooks:
        for each in _complete_optimizers(optimizer):
            loading: list[Mapping[str, Any]] = []
            before = each.register_load_state_dict_pre_hook(partial(_note, loading))
            hooks.callback(before.remove)
            after = each.register_load_state_dict_post_hook(partial(_take_formats, loading))
            hooks.callback(after.remove)
        yield


def _complete_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield an optimizer and those that it holds, by which it may load its states.

    One around another may leave out the initialization of torch's class, and then it cannot be listened to.
    """
    candidates: list[Any] = [optimizer]
    for held in vars(optimizer).values():
        if isinstance(held, list | tuple):
            candidates += held
        else:
            candidates.append(held)
    for each in candidates:
        is_optimizer = isinstance(each, torch.optim.Optimizer)
        if is_optimizer and hasattr(each, _HOOKS):
            yield each


def _note(
    loading: list[Mapping[str, Any]], optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> None:
    loading.append(state_dict)


def _formats_of(optimizer: torch.optim.Optimizer) -> set[str]:
    found = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.add(str(parameter.dtype))
    return found


def _has_saved_formats(adapter: TrainerAdapter, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the parameters have the formats that they had when the checkpoint was saved."""
    checkpoint = adapter.resumes_from
    if checkpoint is None:
        return False
    try:
        fields = read_json(Path(checkpoint) / STATE_NAME)
    except (OSError, ValueError):
        return False  # Trainer names what is wrong with the file
    saved = saved_state_of(fields, _NAME).get(_FORMATS)
    # Stages of a pipeline may have parameters of fewer formats than rank 0
    return isinstance(saved, list) and _formats_of(optimizer) <= set(map(str, saved))


def _take_formats(loading: list[Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Give the loaded states the formats that they have in the state dict."""
    state_dict = loading.pop()
    saved = state_dict["state"]
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        states = saved.get(number, {})
        loaded = optimizer.state.get(parameter, {})
        # Each optimizer of torch has its `step` in a format and on a device of its own
        for name in (states.keys() & loaded.keys()) - {"step"}:
            loaded[name] = _in_format(states[name], loaded[name])


def _in_format(saved: Any, loaded: Any) -> Any:
    """Return a loaded state in the format of the saved one."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    # torch converts what is inside of containers, too
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {name: _in_format(saved.get(name), value) for name, value in loaded.items()}
    if isinstance(saved, list) and isinstance(loaded, list) and len(saved) == len(loaded):
        return [_in_format(*pair) for pair in zip(saved, loaded, strict=True)]
    return loaded
