"""What a checkpoint of a model consists of that transformers has distributed while it loaded it.

Trainer saves the weights of such a model (`distributed_config`) and nothing from which a training could resume. Here a
checkpoint has the files of `ParallelTrainer` (hfscale/checkpoint/formats/parallel.py): each tensor stands for the
complete one, under its name in the model, and its pieces are stored as the ranks hold them. It contains nothing that
depends on the layout, so that any layout resumes from it: other numbers of ranks, of replicas and of ranks that share
the experts. `hfscale.checkpoint.native_loading` reads it.

transformers has functions for it, such as `save_optimizer_distributed`, which Trainer does not call. They are not
used: they write while training waits, and first send strided shards between the ranks.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME

from hfscale.checkpoint.captures.capture import Capture, LiveState
from hfscale.checkpoint.contents import model_files
from hfscale.checkpoint.formats.parallel import (
    ADAPTER_PREFIX,
    FOLDER,
    PARALLEL_NAME,
    ParallelMetadata,
)
from hfscale.checkpoint.formats.parameter_names import ParameterNames, aliases_of, trained_names
from hfscale.checkpoint.formats.view import canonical_name
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.core.versions import is_peft_model
from hfscale.errors import CheckpointError
from hfscale.trainer.parameter_groups import with_entries
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import is_distributed_tensor


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A parameter group of the optimizer as it is in the undistributed model.

    Trainer divides its two groups, with and without weight decay, by the meshes of the parameters, so that their
    number depends on the layout.
    """

    names: list[str]
    """Names of its parameters."""
    options: dict[str, Any]
    """Learning rate, weight decay, betas …, without `params`."""
    number: int
    """The number of the first of the optimizer's own groups that are parts of it."""


class NativeCapture(Capture):
    """Copies the shards of a natively distributed model, and writes what Trainer's own method leaves out."""

    replaces_trainer = True
    _model_files: Mapping[str, bytes] | None = None

    def why_synchronous(self) -> str | None:
        return None

    def live(self) -> LiveState:
        """Collect the tensors that this rank writes.

        Raises:
            CheckpointError: the optimizer keeps a state that is not distributed like its parameter.
        """
        trainer = self._trainer
        tensors = {f"model.{name}": tensor for name, tensor in weights(trainer).items()}
        states = Strategy.of(trainer).torch_optimizer().state
        for full_name, parameter in optimized(trainer):
            prefix = f"optimizer.{stored_name(full_name)}"
            for key, value in states.get(parameter, {}).items():
                if value is not None:
                    state = torch.as_tensor(value)
                    _check_state(full_name, parameter, key, state)
                    tensors[f"{prefix}.{key}"] = state
        return LiveState(shards={FOLDER: tensors})

    def files(self) -> Mapping[str, bytes]:
        trainer = self._trainer
        if self._model_files is None:
            self._model_files = model_files(trainer)
        layout = self._strategy.manifest_layout()
        assert layout is not None  # the model of this Trainer is natively distributed
        groups = _groups(trainer)
        names = ParameterNames(
            groups=[group.names for group in groups], aliases=aliases_of(model_of(trainer))
        )
        metadata = ParallelMetadata(
            layout=layout, groups=[group.options for group in groups], by_name=True
        )
        files = {
            PARAMETERS_NAME: names.to_json().encode(),
            PARALLEL_NAME: metadata.to_json().encode(),
            SCHEDULER_NAME: _saved(self._scheduler_state(groups)),
        }
        if trainer.accelerator.scaler is not None:
            files[SCALER_NAME] = _saved(trainer.accelerator.scaler.state_dict())
        return {**self._model_files, **files}

    def _scheduler_state(self, groups: list[_Group]) -> dict[str, Any]:
        """Return the state of the scheduler with one entry for each of `groups` in its lists."""
        assert self._trainer.lr_scheduler is not None  # Trainer makes it before the first save
        numbers = [group.number for group in groups]
        return with_entries(
            self._trainer.lr_scheduler.state_dict(),
            len(self._strategy.torch_optimizer().param_groups),
            numbers,
        )


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# --- the tensors of a model and of its optimizer ---------------------------------------------------------------------


def _named_parameters(trainer: Trainer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters as they are between two steps: sharded. After an evaluation some may be gathered."""
    Strategy.of(trainer).reshard()
    for name, parameter in model_of(trainer).named_parameters():
        yield canonical_name(name), parameter


def stored_name(name: str) -> str:
    """Return the name of a parameter in the model without the wrappers of adapters.

    Args:
        name (`str`): its name in the model as it is trained.
    """
    return name.removeprefix(ADAPTER_PREFIX)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return this rank's parameters and persistent buffers; of a model with adapters, only the trained parameters.

    Args:
        trainer (`Trainer`): prepared for training.

    Returns:
        `dict[str, torch.Tensor]`: name in a checkpoint -> live tensor.
    """
    model = model_of(trainer)
    named = dict(_named_parameters(trainer))
    if is_peft_model(model):
        return {
            stored_name(name): parameter.data
            for name, parameter in named.items()
            if parameter.requires_grad
        }
    persistent = model.state_dict().keys()
    buffers = {
        canonical_name(name): buffer for name, buffer in model.named_buffers() if name in persistent
    }
    return {name: parameter.data for name, parameter in named.items()} | buffers


def optimized(trainer: Trainer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that the optimizer steps, with their names, in the order of its groups.

    Args:
        trainer (`Trainer`): prepared for training.

    Raises:
        CheckpointError: the optimizer steps a tensor that is no parameter of the model.
    """
    names = {id(parameter): name for name, parameter in _named_parameters(trainer)}
    optimizer = Strategy.of(trainer).torch_optimizer()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in names for parameter in parameters):
        raise CheckpointError(
            f"{type(optimizer).__name__} steps tensors that are no parameters of the model: their state cannot be "
            "saved by name; let the Trainer make the optimizer (--optim)"
        )
    return [(names[id(parameter)], parameter) for parameter in parameters]


def names_by_group(trainer: Trainer) -> list[list[str]]:
    """Return the names of the parameters in each group of the optimizer.

    Args:
        trainer (`Trainer`): see `optimized`.

    Raises:
        CheckpointError: the optimizer steps a tensor that is no parameter of the model.
    """
    pairs = iter(optimized(trainer))
    groups = Strategy.of(trainer).torch_optimizer().param_groups
    return [[next(pairs)[0] for _ in group["params"]] for group in groups]


def _check_state(name: str, parameter: torch.Tensor, key: str, state: torch.Tensor) -> None:
    """Check that a state of the optimizer is one number, or distributed like its parameter.

    Raises:
        CheckpointError: it is neither, so that another layout could not be given its part.
    """
    has_same_shape = state.shape == parameter.shape
    are_both_distributed = is_distributed_tensor(state) == is_distributed_tensor(parameter)
    is_like_parameter = has_same_shape and are_both_distributed
    if state.ndim > 0 and not is_like_parameter:
        raise CheckpointError(
            f"the optimizer's {key} of '{name}' has the shape {list(state.shape)} and the parameter "
            f"{list(parameter.shape)} over several ranks: such a state cannot be saved for other layouts; choose an "
            "optimizer whose states have the shape of their parameter (--optim adamw_torch)"
        )


def _groups(trainer: Trainer) -> list[_Group]:
    """Return the groups of the optimizer as Trainer makes them for an undistributed model.

    If the groups are others than Trainer's, they are returned as they are.
    """
    groups = []
    own = Strategy.of(trainer).torch_optimizer().param_groups
    for number, (names, group) in enumerate(zip(names_by_group(trainer), own, strict=True)):
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(_Group(names=names, options=options, number=number))
    wholes = trained_names(model_of(trainer)).groups
    parts_of_wholes = _parts_of(wholes, groups)
    if parts_of_wholes is None:
        return groups
    stepped = {name for group in groups for name in group.names}
    decays = (trainer.args.weight_decay, 0.0)
    made = []
    for names, parts, decay in zip(wholes, parts_of_wholes, decays, strict=True):
        kept = [name for name in names if name in stepped]
        if parts:
            made.append(replace(parts[0], names=kept))
        else:  # adapters leave one of the two without parameters
            options = groups[0].options | {"weight_decay": decay}
            made.append(_Group(names=kept, options=options, number=0))
    return made


def _parts_of(wholes: Sequence[list[str]], groups: list[_Group]) -> list[list[_Group]] | None:
    """Return which groups each whole one has been divided into.

    Returns:
        `list[list[_Group]]` or `None`: the parts of each; None if a group is part of none, or if parts have different
            options, so that they are no parts of one group.
    """
    found: list[list[_Group]] = [[] for _ in wholes]
    for group in groups:
        containing = (
            number for number, names in enumerate(wholes) if set(group.names) <= set(names)
        )
        number = next(containing, None)
        if number is None:
            return None
        parts = found[number]
        if parts and parts[0].options != group.options:
            return None
        parts.append(group)
    return found
