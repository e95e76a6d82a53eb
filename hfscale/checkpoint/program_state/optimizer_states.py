"""Names what an optimizer keeps outside its `state_dict`, so that no checkpoint has it.

Optimizers of packages and of users do so in two ways: they hold tensors, or an optimizer inside, in attributes that
their `state_dict` does not return, as transformers' layer-wise optimizers do in hooks; or they keep states in a
parameter group by tensor, as GrokAdamW does, and a loaded group has other tensors.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hfscale.checkpoint.program_state.objects import is_of_program
from hfscale.core.logging import get_logger
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import own_part

logger = get_logger(__name__)

_MAX_DEPTH = 6
_MAX_ENTRIES = 100_000
_MARKED = 64
_LAST_LOOK = 64
"""The last step that is looked at; optimizers with slow weights move them every five or ten steps."""


class OptimizerStates(TrainerCallback):
    """Looks at the optimizer after steps 1, 2, 4, 8 … of a training, and names what changes and is in no checkpoint.

    Args:
        optimizer (`Optimizer`): the optimizer that steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._steps = 0
        self._first: dict[str, float] = {}
        self._is_told = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._steps += 1
        is_looked_at = self._steps.bit_count() == 1 and self._steps <= _LAST_LOOK
        if self._is_told or not is_looked_at:
            return
        tensors = kept_apart(self._optimizer)
        marks = {path: _mark(tensor) for path, tensor in tensors.items()}
        if self._steps == 1:
            self._first = marks
            return
        changed = [path for path, mark in marks.items() if self._first.get(path) != mark]
        if keeps_by_tensor(self._optimizer):
            changed.append("optimizer.param_groups")
        if changed:
            self._is_told = True
            self._tell(changed)

    def _tell(self, changed: list[str]) -> None:
        others = len(changed) - 1
        more = f" and {others} more" if others else ""
        logger.warning(
            "the optimizer %s keeps states that its state_dict does not restore (%s%s), and no checkpoint has them: a "
            "resumed run begins them anew, and goes on otherwise than without the interruption; take an optimizer "
            "that keeps its states in `optimizer.state`",
            type(self._optimizer).__name__,
            changed[0],
            more,
        )


def watch_optimizer_states(adapter: TrainerAdapter) -> None:
    """Have named what the optimizer keeps apart, in one of the first steps. DeepSpeed's engine saves its own states.

    Args:
        adapter (`TrainerAdapter`): the adapter of the Trainer that trains.
    """
    strategy = Strategy.of(adapter.trainer)
    optimizer = strategy.torch_optimizer()
    if not strategy.engine_steps and isinstance(optimizer, torch.optim.Optimizer):
        adapter.append_callback(OptimizerStates(optimizer))


def kept_apart(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors that an optimizer holds and its `state_dict` does not, by the path that leads to each.

    Parameters and gradients do not count.

    Args:
        optimizer (`Optimizer`): an optimizer that has stepped.
    """
    known: list[Any] = []
    for group in optimizer.param_groups:
        known += group["params"]
        known += [parameter.grad for parameter in group["params"]]
    try:
        saved = optimizer.state_dict()
    except NotImplementedError:  # the first save says so
        return {}
    known += [tensor for _, tensor in _tensors_in(saved, "")]
    if is_of_program(optimizer):  # `ProgramState` keeps its attributes, or names them
        known += vars(optimizer).values()
    # Numbers of objects mean something only while `known` and `saved` hold these
    numbers = set(map(id, known))
    found = {}
    for path, tensor in _tensors_in(optimizer, "optimizer"):
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        if not is_parameter and id(tensor) not in numbers:
            found[path] = tensor
    if not found:
        return {}
    # A `state_dict` may return copies
    copies = set()
    for _, tensor in _tensors_in(saved, ""):
        copies.add((tensor.shape, _mark(tensor)))
    apart = {}
    for path, tensor in found.items():
        content = (tensor.shape, _mark(tensor))
        if content not in copies:
            apart[path] = tensor
    return apart


def keeps_by_tensor(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a parameter group has entries by tensor, which a loaded group does not find again.

    Args:
        optimizer (`Optimizer`): an optimizer that has stepped.
    """
    for group in optimizer.param_groups:
        for entry in group.values():
            if not isinstance(entry, Mapping):
                continue
            if any(isinstance(key, torch.Tensor) for key in entry):
                return True
    return False


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that an object leads to, each once, with the path to it."""
    seen: dict[int, Any] = {}
    waiting: deque[tuple[str, Any, int]] = deque()
    waiting.append((path, value, 0))
    while waiting and len(seen) < _MAX_ENTRIES:
        path, value, depth = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            yield path, value
            continue
        if depth == _MAX_DEPTH:
            continue
        for name, part in _parts_of(value):
            waiting.append((path + name, part, depth + 1))


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each with the name by which it does."""
    if isinstance(value, Mapping):
        for number, (key, part) in enumerate(value.items()):
            is_named = isinstance(key, str | int)
            yield f"[{key!r}]" if is_named else f"[{number}]", part
        return
    if isinstance(value, list | tuple | deque | set):
        for number, part in enumerate(value):
            yield f"[{number}]", part
        return
    # Other objects, such as a Trainer, lead to what is of the whole program
    if not isinstance(value, torch.optim.Optimizer):
        return
    for name, part in vars(value).items():
        yield f".{name}", part


def _mark(tensor: torch.Tensor) -> float:
    """Return a number that another state very likely has another of."""
    part = own_part(tensor.detach())
    if part is None or part.is_meta:
        return 0.0
    head = part.reshape(-1)[:_MARKED]
    return float(head.double().sum())
