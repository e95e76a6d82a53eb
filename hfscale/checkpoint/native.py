"""Checkpoints of models that transformers has distributed while it loaded them (`distributed_config`).

Trainer saves the weights of such a model and nothing from which a training could resume. Here a checkpoint has the
files of `ParallelTrainer` (hfscale/checkpoint/formats/parallel.py): each tensor stands for the complete one, under its
name in the model, and its pieces are stored as the ranks hold them. It contains nothing that depends on the layout, so
that any layout resumes from it: other numbers of ranks, of replicas and of ranks that share the experts.

transformers has functions for it, such as `save_optimizer_distributed`, which Trainer does not call. They are not
used: they write while training waits, and first send strided shards between the ranks.
"""

import io
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME

from hfscale.checkpoint.contents import model_files, rng_name
from hfscale.checkpoint.formats import layout_of
from hfscale.checkpoint.formats.parallel import (
    ADAPTER_PREFIX,
    FOLDER,
    PARALLEL_NAME,
    PART,
    ParallelMetadata,
    read_parallel_metadata,
)
from hfscale.checkpoint.formats.parameter_names import (
    ParameterNames,
    aliases_of,
    read_parameter_names,
    trained_names,
)
from hfscale.checkpoint.formats.pieces import PieceLoadPlanner, Pieces
from hfscale.checkpoint.formats.view import canonical_name
from hfscale.checkpoint.loading import readable_checkpoint
from hfscale.checkpoint.manifest import read_manifest
from hfscale.checkpoint.pickles import Entry, load_archive, read_dcp_metadata
from hfscale.checkpoint.rng_states import copy_first_rng_state
from hfscale.core.collectives import START
from hfscale.core.disk_errors import PROGRAM_ERRORS
from hfscale.core.run_files import MANIFEST_NAME, PARAMETERS_NAME
from hfscale.core.versions import is_peft_model
from hfscale.errors import CheckpointError
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies.native import NativeLayout, native_layout

_OF_THE_LAUNCH = ("foreach", "fused", "capturable", "differentiable")
"""Options of an optimizer that say how it computes, which a checkpoint does not decide."""


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


class NativeState:
    """Returns what the checkpoints of a natively distributed model consist of.

    Args:
        trainer (`Trainer`): prepared for training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._model_files: dict[str, bytes] | None = None

    def sharded_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Collect the tensors that this rank writes. They share the training's memory: copy them before the next step.

        Returns:
            Subfolder of the checkpoint -> name -> tensor.

        Raises:
            CheckpointError: the optimizer keeps a state that is not distributed like its parameter.
        """
        tensors = {f"model.{name}": tensor for name, tensor in _weights(self._trainer).items()}
        for full_name, parameter in _optimized(self._trainer):
            for key, value in _optimizer(self._trainer).state.get(parameter, {}).items():
                if value is not None:
                    state = torch.as_tensor(value)
                    _check_state(full_name, parameter, key, state)
                    tensors[f"optimizer.{_stored_name(full_name)}.{key}"] = state
        return {FOLDER: tensors}

    def checkpoint_files(self) -> dict[str, bytes]:
        """Return the small files that the main process writes in addition to the tensors, from the current state."""
        trainer = self._trainer
        if self._model_files is None:
            self._model_files = model_files(trainer)
        layout = native_layout(trainer.model)
        assert layout is not None  # the model of this Trainer is natively distributed
        groups = _groups(trainer)
        names = ParameterNames(
            groups=[group.names for group in groups], aliases=aliases_of(model_of(trainer))
        )
        metadata = ParallelMetadata(
            layout=layout.to_dict(), groups=[group.options for group in groups]
        )
        files = {
            PARAMETERS_NAME: names.to_json().encode(),
            PARALLEL_NAME: metadata.to_json().encode(),
            SCHEDULER_NAME: _saved(self._scheduler_state(groups)),
        }
        if trainer.accelerator.scaler is not None:
            files[SCALER_NAME] = _saved(trainer.accelerator.scaler.state_dict())
        return self._model_files | files

    def _scheduler_state(self, groups: list[_Group]) -> dict[str, Any]:
        """Return the state of the scheduler with one entry for each of `groups` in its lists."""
        assert self._trainer.lr_scheduler is not None  # Trainer makes it before the first save
        numbers = [group.number for group in groups]
        return _with_entries(
            self._trainer.lr_scheduler.state_dict(),
            len(_optimizer(self._trainer).param_groups),
            numbers,
        )


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _with_entries(state: dict[str, Any], length: int, numbers: list[int]) -> dict[str, Any]:
    """Return the state of a scheduler whose lists with `length` entries, one per parameter group, have these entries.

    Args:
        state (`dict[str, Any]`): the `state_dict()` of a scheduler.
        length (`int`): number of its parameter groups.
        numbers (`list[int]`): for each group of the result, the number of the group whose entry it gets.
    """

    def fitted(value: Any) -> Any:
        return (
            [value[number] for number in numbers]
            if isinstance(value, list) and len(value) == length
            else value
        )

    return {key: fitted(value) for key, value in state.items()}


# --- the tensors of a model and of its optimizer ---------------------------------------------------------------------


def _optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """Return the optimizer inside of Accelerate's wrapper."""
    optimizer: Any = trainer.optimizer
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _named_parameters(trainer: Trainer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters as they are between two steps: sharded. After an evaluation some may be gathered."""
    model = model_of(trainer)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in model.named_parameters():
        yield canonical_name(name), parameter


def _stored_name(name: str) -> str:
    """Return the name of a parameter in the model without the wrappers of adapters."""
    return name.removeprefix(ADAPTER_PREFIX)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return this rank's parameters and persistent buffers; of a model with adapters, only the trained parameters."""
    model = model_of(trainer)
    named = dict(_named_parameters(trainer))
    if is_peft_model(model):
        return {
            _stored_name(name): parameter.data
            for name, parameter in named.items()
            if parameter.requires_grad
        }
    persistent = model.state_dict().keys()
    buffers = {
        canonical_name(name): buffer for name, buffer in model.named_buffers() if name in persistent
    }
    return {name: parameter.data for name, parameter in named.items()} | buffers


def _optimized(trainer: Trainer) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that the optimizer steps, in the order of its groups.

    Raises:
        CheckpointError: the optimizer steps a tensor that is no parameter of the model.
    """
    names = {id(parameter): name for name, parameter in _named_parameters(trainer)}
    parameters = [
        parameter for group in _optimizer(trainer).param_groups for parameter in group["params"]
    ]
    if any(id(parameter) not in names for parameter in parameters):
        raise CheckpointError(
            f"{type(_optimizer(trainer)).__name__} steps tensors that are no parameters of the model: their state "
            "cannot be saved by name; let the Trainer make the optimizer (--optim)"
        )
    return [(names[id(parameter)], parameter) for parameter in parameters]


def _check_state(name: str, parameter: torch.Tensor, key: str, state: torch.Tensor) -> None:
    """Check that a state of the optimizer is one number, or distributed like its parameter.

    Raises:
        CheckpointError: it is neither, so that another layout could not be given its part.
    """
    is_like_parameter = state.shape == parameter.shape and isinstance(state, DTensor) == isinstance(
        parameter, DTensor
    )
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
    own = _optimizer(trainer).param_groups
    optimized = iter(_optimized(trainer))
    members = [[next(optimized)[0] for _ in group["params"]] for group in own]
    options = [{key: value for key, value in group.items() if key != "params"} for group in own]
    with_decay, without_decay = trained_names(model_of(trainer)).groups
    # Numbers of the optimizer's groups that are parts of one of Trainer's
    parts: list[list[int]] = [[], []]
    for number, names in enumerate(members):
        if set(names) <= set(with_decay):
            parts[0].append(number)
        elif set(names) <= set(without_decay):
            parts[1].append(number)
    is_divided = sum(map(len, parts)) == len(own)
    if not is_divided or any(
        options[number] != options[part[0]] for part in parts for number in part
    ):
        return [
            _Group(names=members[number], options=options[number], number=number)
            for number in range(len(own))
        ]
    known = {name for names in members for name in names}
    groups = []
    for names, part, decay in zip(
        (with_decay, without_decay), parts, (trainer.args.weight_decay, 0.0), strict=True
    ):
        first = options[part[0]] if part else options[0] | {"weight_decay": decay}
        found = [name for name in names if name in known]
        groups.append(_Group(names=found, options=first, number=part[0] if part else 0))
    return groups


# --- resuming --------------------------------------------------------------------------------------------------------


class NativeLoading:
    """Reads checkpoints in place of the methods by which a Trainer resumes.

    A checkpoint of another strategy is converted first.

    Args:
        adapter (`TrainerAdapter`): the adapter of a Trainer whose model is natively distributed.
    """

    def __init__(self, adapter: TrainerAdapter) -> None:
        self._trainer = adapter.trainer
        self._readable: dict[str, Path] = {}
        self._load_rng_of_rank = adapter.replace_loading(
            model=self.load_model,
            optimizer_and_scheduler=self.load_optimizer_and_scheduler,
            rng_state=self.load_rng_state,
            best_model=self.load_best_model,
        )

    def load_model(self, checkpoint: str, model: nn.Module | None = None) -> None:
        """Read this rank's part of the weights, in place. Every rank must call it.

        Args:
            checkpoint (`str`): the folder of the checkpoint.
            model (`nn.Module`, *optional*): not used; Trainer passes it.

        Raises:
            CheckpointError: the checkpoint cannot be converted, is broken, or is of another model.
        """
        folder = self._folder(checkpoint)
        wanted = {f"model.{name}": tensor for name, tensor in _weights(self._trainer).items()}
        with START.agreed("native: load the weights"):
            _read(folder, wanted)

    def load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read this rank's part of the optimizer's state, its options and the position of the schedule.

        Every rank must call it.

        Args:
            checkpoint (`str`, *optional*): the folder of the checkpoint; None: nothing is read.

        Raises:
            CheckpointError: the checkpoint is broken, or of another model.
        """
        if checkpoint is None:
            return
        folder = self._folder(checkpoint)
        with START.agreed("native: load the optimizer"):
            _load_optimizer(self._trainer, folder)

    def load_rng_state(self, checkpoint: str | None) -> None:
        """Restore each rank's own random state. In another layout all ranks get that of the first rank.

        They all start a run with one seed, and ranks that share a matrix must drop out the same elements.

        Args:
            checkpoint (`str`, *optional*): the folder of the checkpoint; None: nothing is read.
        """
        if checkpoint is None:
            return
        folder = self._folder(checkpoint)
        if read_parallel_metadata(folder).layout == self._layout.to_dict():
            self._load_rng_of_rank(str(folder))
            return
        with tempfile.TemporaryDirectory() as copies:
            world_size = self._trainer.args.world_size
            copy_first_rng_state(
                folder, Path(copies) / rng_name(self._trainer), world_size=world_size
            )
            self._load_rng_of_rank(copies)

    def load_best_model(self) -> None:
        """Read the weights of the best checkpoint. Every rank must call it."""
        self.load_model(str(self._trainer.state.best_model_checkpoint))

    @property
    def _layout(self) -> NativeLayout:
        layout = native_layout(self._trainer.model)
        assert layout is not None  # the model of this Trainer is natively distributed
        return layout

    def _folder(self, checkpoint: str) -> Path:
        """Return the checkpoint, or its conversion if another strategy has written it. Every rank must call it.

        Raises:
            CheckpointError: it has no manifest and is of another strategy, so that it cannot be converted.
            LayoutError: the conversion failed.
        """
        if checkpoint not in self._readable:
            has_manifest = (Path(checkpoint) / MANIFEST_NAME).is_file()
            is_readable = has_manifest and layout_of(
                read_manifest(checkpoint).strategy
            ) == layout_of("native")
            readable: str | None = checkpoint
            if not is_readable:
                readable = readable_checkpoint(self._trainer.args, checkpoint, strategy="native")
            self._readable[checkpoint] = Path(str(readable))
        folder = self._readable[checkpoint]
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{checkpoint} has no state that a model loaded with distributed_config can resume from, and no "
                "manifest: convert it with `hfscale checkpoints convert "
                f"{checkpoint} NEW_FOLDER --to native --global-batch-size N`, or load its weights with from_pretrained"
            )
        return folder


def _read(checkpoint: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Read tensors in place, each rank its own parts, from a checkpoint of any layout.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.
        tensors (`Mapping[str, torch.Tensor]`): by name in the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or cannot be read.
    """
    # Nothing is unpickled before it has been checked
    entries = read_dcp_metadata(checkpoint / FOLDER)
    packed = read_parallel_metadata(checkpoint).packed
    wanted: dict[str, Pieces] = {}
    for name, tensor in tensors.items():
        wanted |= _pieces_to_read(checkpoint, entries, packed, name, tensor)
    reader = FileSystemReader(checkpoint / FOLDER)
    planner = PieceLoadPlanner(wanted)
    try:
        metadata = reader.read_metadata()
        planner.set_up_planner({}, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(plan, planner).wait()
    except PROGRAM_ERRORS:
        raise
    except Exception as error:  # a broken archive raises exceptions of any type
        raise CheckpointError(
            f"{checkpoint / FOLDER} cannot be read: {str(error).splitlines()[0][:200]}"
        ) from error


def _pieces_to_read(
    checkpoint: Path,
    entries: Mapping[str, Entry],
    packed: Mapping[str, int],
    name: str,
    tensor: torch.Tensor,
) -> dict[str, Pieces]:
    """Return what this rank reads of a tensor, by name: `ParallelTrainer` stores a packed matrix in parts.

    Raises:
        CheckpointError: the tensor is missing or has another shape.
    """
    whole = Pieces.of(tensor)
    if name in entries:
        _check_entry(checkpoint, name, entries[name], tensor.shape)
        return {name: whole}
    parts = [part for part in entries if part.startswith(name + PART)]
    own = name.partition(".")[2]
    dim = packed.get(own, packed.get(own.rpartition(".")[0]))
    if not parts or dim is None:
        raise CheckpointError(
            f"{checkpoint} does not hold this model: it has no '{own}'; resume with the model of it"
        )
    found = {}
    start = 0
    for number in range(len(parts)):
        part = f"{name}{PART}{number}"
        shape = list(tensor.shape)
        shape[dim] //= len(parts)
        if part not in entries:
            raise CheckpointError(
                f"{checkpoint}: {len(parts)} parts of '{own}' are stored, and part {number} is not"
            )
        _check_entry(checkpoint, part, entries[part], torch.Size(shape))
        found[part] = whole.narrow(dim, start, shape[dim])
        start += shape[dim]
    return found


def _check_entry(checkpoint: Path, name: str, entry: Entry, shape: torch.Size) -> None:
    """Check the stored shape of a tensor, and that all its elements are stored.

    Raises:
        CheckpointError: the shape is another one, or elements are missing.
    """
    own = name.partition(".")[2]
    if entry.shape is not None and entry.shape != tuple(shape):
        is_of_experts = (
            len(shape) > 2
            and len(entry.shape) == len(shape)
            and entry.shape[1:] == tuple(shape)[1:]
        )
        experts = f" ({entry.shape[0]} experts instead of {shape[0]})" if is_of_experts else ""
        raise CheckpointError(
            f"{checkpoint} does not hold this model: '{own}' has the shape {list(entry.shape)} there and "
            f"{list(shape)} here{experts}; resume with the model that wrote it, or start from scratch in another "
            "output_dir"
        )
    stored = sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
    if entry.shape is None or stored != shape.numel():
        raise CheckpointError(
            f"{checkpoint}: {stored} of the {shape.numel()} elements of '{own}' are stored"
        )


def _load_optimizer(trainer: Trainer, checkpoint: Path) -> None:
    """Read states, options and schedule; see `NativeLoading.load_optimizer_and_scheduler`."""
    optimizer = _optimizer(trainer)
    entries = read_dcp_metadata(checkpoint / FOLDER)
    keys: dict[str, set[str]] = {}
    for name in entries:
        kind, _, rest = name.partition(".")
        own, _, key = rest.rpartition(".")
        if kind == "optimizer":
            keys.setdefault(own, set()).add(key.partition(PART)[0])
    is_on_device = any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    wanted: dict[str, torch.Tensor] = {}
    for full_name, parameter in _optimized(trainer):
        own = _stored_name(full_name)
        state: dict[str, torch.Tensor] = {}
        for key in sorted(keys.get(own, ())):
            entry = entries.get(f"optimizer.{own}.{key}")
            if entry is not None and entry.shape == ():
                state[key] = torch.zeros(
                    (), dtype=torch.float32, device=parameter.device if is_on_device else "cpu"
                )
            else:
                state[key] = torch.zeros_like(parameter.data)
            wanted[f"optimizer.{own}.{key}"] = state[key]
        if state:
            optimizer.state[parameter] = state
    _read(checkpoint, wanted)
    numbers = _restore_options(trainer, checkpoint)
    stored_groups = len(read_parallel_metadata(checkpoint).groups)
    scheduler = _with_entries(load_archive(checkpoint / SCHEDULER_NAME), stored_groups, numbers)
    assert trainer.lr_scheduler is not None  # Trainer makes it before it loads a checkpoint
    trainer.lr_scheduler.load_state_dict(scheduler)


def _restore_options(trainer: Trainer, checkpoint: Path) -> list[int]:
    """Give each group of the optimizer the options that its parameters had.

    Returns:
        `list[int]`: for each group of the optimizer, the number of its group in the checkpoint.

    Raises:
        CheckpointError: a group has parameters that were in several groups, or in none.
    """
    stored = read_parameter_names(checkpoint).groups
    options = read_parallel_metadata(checkpoint).groups
    group_of = {name: number for number, names in enumerate(stored) for name in names}
    optimized = iter(_optimized(trainer))
    numbers = []
    for group in _optimizer(trainer).param_groups:
        names = [next(optimized)[0] for _ in group["params"]]
        found = {group_of.get(name, -1) for name in names} or {0}
        number = found.pop()
        if found or number < 0:
            raise CheckpointError(
                f"{checkpoint} was saved with other parameter groups than this optimizer has, such as that of "
                f"'{names[0]}': resume with the same trained parameters and optimizer"
            )
        known = {k: v for k, v in options[number].items() if k in group and k not in _OF_THE_LAUNCH}
        group.update(known)
        numbers.append(number)
    return numbers
