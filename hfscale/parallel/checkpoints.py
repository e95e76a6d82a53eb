"""What `ParallelTrainer` writes and reads: checkpoints that any layout can resume, and models for `from_pretrained`.

A checkpoint's folder `dcp` is a torch distributed checkpoint under the names of the Hugging Face model. It holds
`model.<parameter>` and `optimizer.<parameter>.<state>` (`exp_avg`, `step`, …): each tensor stands for the complete
one, and its pieces are stored as the ranks hold them. It contains nothing that depends on the layout: no parameter
groups of a rank, no rank numbers, no second copy of tied weights.

The checkpoint also has Trainer's small files, and two JSON files with what the tensors do not contain, so that any
layout, and by conversion any strategy, can resume from it. `sharded_state` and `checkpoint_files` return all that is
to be written, so that `hfscale.checkpoint.saving` can also write it in the background.
"""

import json
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, Shard
from transformers import Trainer
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hfscale.checkpoint.contents import model_files, rng_name
from hfscale.checkpoint.formats.dcp import dcp_errors, save_shards
from hfscale.checkpoint.formats.parallel import (
    ADAPTER_PREFIX,
    FOLDER,
    PARALLEL_NAME,
    PART,
    ParallelMetadata,
    read_parallel_metadata,
    restore_groups,
)
from hfscale.checkpoint.formats.parameter_names import ParameterNames
from hfscale.checkpoint.loading import keeps_steps_on_device, readable_checkpoint
from hfscale.checkpoint.pickles import load_archive
from hfscale.checkpoint.rng_states import copy_first_rng_state
from hfscale.core import distributed
from hfscale.core.collectives import TRAINING
from hfscale.core.disk_errors import PROGRAM_ERRORS
from hfscale.core.logging import get_logger
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.core.spelling import spelled
from hfscale.errors import CheckpointError, UsageError
from hfscale.facts.layout import ParallelLayout
from hfscale.parallel.groups import (
    Group,
    check_as_in_one_process,
    check_schedule,
    check_storable,
    exchange_groups,
    groups_of_one_process,
    groups_of_rank,
    unsplit_groups,
)
from hfscale.parallel.mesh import ParallelMesh, copy_local_shard, local_tensor, reshard, shard_dim
from hfscale.parallel.model import ParallelizedModel
from hfscale.parallel.optimizers import StateKind, check_update
from hfscale.parallel.tensor import PackedParameter
from hfscale.trainer.adapter import TrainerAdapter
from hfscale.trainer.parameter_groups import packed_state, with_group_entries

logger = get_logger(__name__)

ADAPTER_FILE = "adapter_model.safetensors"
_FILE_BYTES = 5 * 10**9  # transformers' own size of a shard


# --- the tensors of a checkpoint -------------------------------------------------------------------------------------


def reshard_all(parallelized: ParallelizedModel) -> None:
    """Make FSDP2 free the gathered parameters of all stages of this rank; see `hfscale.parallel.mesh.reshard`."""
    for stage in parallelized.stages:
        reshard(stage)


def model_tensors(
    parallelized: ParallelizedModel, saved: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Collect this rank's parameters and persistent buffers by canonical name; they share the model's memory.

    Of a model with adapters only the trained parameters are collected, and what PEFT saves with them.

    Args:
        parallelized (`ParallelizedModel`): the model; its gathered parameters are freed first.
        saved (`Collection[str]`): names of the tensors that PEFT saves of the adapters.

    Returns:
        Name in the unsplit model -> this rank's tensor: a `DTensor` where the parameter is sharded.
    """
    reshard_all(parallelized)
    parameters = parallelized.model.named_parameters()
    if parallelized.has_adapters:
        found = {name: p.data for name, p in parameters if p.requires_grad or name in saved}
        buffers = parallelized.model.named_buffers()
        return found | {name: buffer for name, buffer in buffers if name in saved}
    tensors = {_canonical_name(parallelized, name): p.data for name, p in parameters}
    persistent = parallelized.model.state_dict().keys()
    return tensors | {
        name: b for name, b in parallelized.model.named_buffers() if name in persistent
    }


def stored_tensors(
    parallelized: ParallelizedModel,
    optimizer: torch.optim.Optimizer | None,
    *,
    saved: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Collect what this rank writes into a checkpoint's folder `dcp`.

    Args:
        parallelized (`ParallelizedModel`): the model.
        optimizer (`torch.optim.Optimizer`, *optional*): where given, its state is collected too.
        saved (`Collection[str]`): names of the tensors that PEFT saves of the adapters.

    Returns:
        Name -> tensor. Each is one rectangle of a complete tensor. They share the training's memory, so their values
        change with the next step.
    """
    model = model_tensors(parallelized, saved)
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    if optimizer is not None:
        for name, parameter in _optimized_parameters(parallelized, optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, float):
                    value = torch.tensor(value, dtype=torch.float64)
                if value is not None:
                    tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    return dict(_unpacked(parallelized, tensors))


def load_model(
    checkpoint: Path, parallelized: ParallelizedModel, *, saved: Collection[str] = ()
) -> None:
    """Read this rank's part of the model, in place, from a checkpoint of any layout.

    Args:
        checkpoint (`Path`): the checkpoint's folder.
        parallelized (`ParallelizedModel`): the model.
        saved (`Collection[str]`): names of the tensors that PEFT saves of the adapters; those that do not train are
            read where the checkpoint has them.

    Raises:
        CheckpointError: the tensors cannot be read, or a parameter is missing or has another shape.
    """
    stored = _stored_names(checkpoint)
    always = model_tensors(parallelized)
    tensors = {}
    for name, tensor in model_tensors(parallelized, saved).items():
        stored_name = f"model.{name}"
        # Earlier versions stored trained parameters alone
        if name in always or stored_name in stored:
            tensors[stored_name] = tensor
    _read_tensors(checkpoint, parallelized, tensors)
    if parallelized.tied is not None:
        parallelized.tied.equalize()


def load_optimizer(
    checkpoint: Path,
    parallelized: ParallelizedModel,
    optimizer: torch.optim.Optimizer,
    kinds: Mapping[str, StateKind],
) -> None:
    """Read this rank's part of the optimizer's state from a checkpoint of any layout.

    Args:
        checkpoint (`Path`): the checkpoint's folder.
        parallelized (`ParallelizedModel`): the model.
        optimizer (`torch.optim.Optimizer`): its state is replaced.
        kinds (`Mapping[str, StateKind]`): how it keeps its states, by their key, where that is known.

    Raises:
        CheckpointError: the tensors cannot be read, or a state is neither a single number nor of its parameter's
            shape.
    """
    shapes = _stored_shapes(checkpoint)
    has_steps_on_device = keeps_steps_on_device(optimizer)
    states: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, parameter in _optimized_parameters(parallelized, optimizer):
        prefix = f"optimizer.{name}."
        keys = {key.removeprefix(prefix).split(PART)[0] for key in shapes if key.startswith(prefix)}
        states[parameter] = {}
        for key in sorted(keys):
            shape = shapes.get(prefix + key)
            kind = kinds.get(key)
            if shape is not None and len(shape) == 0:
                device = parameter.device if has_steps_on_device else torch.device("cpu")
                state = torch.zeros((), dtype=_dtype_of_number(kind), device=device)
            elif shape is None or shape == parameter.shape:
                dtype = kind.dtype if kind is not None else None
                state = torch.zeros_like(parameter.data, dtype=dtype)
            elif not isinstance(
                parameter, DTensor
            ):  # this rank has all of it, as that of Adafactor
                state = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            else:
                raise CheckpointError(
                    f"{checkpoint}: {prefix}{key} has shape {tuple(shape)}, but its parameter has "
                    f"{tuple(parameter.shape)}: the state of this optimizer cannot be sharded; choose another one "
                    "with --optim and start from the weights with --model_name_or_path"
                )
            states[parameter][key] = wanted.setdefault(prefix + key, state)
    _read_tensors(checkpoint, parallelized, wanted)
    for parameter, tensors in states.items():
        # Two copies of a tied weight on one rank have read the same tensors; each of them steps its own.
        optimizer.state[parameter] = {
            key: _as_kept(tensor, kinds.get(key)) for key, tensor in tensors.items()
        }


def _dtype_of_number(kind: StateKind | None) -> torch.dtype:
    """Return the data type in which a number is read: exactly, where the optimizer keeps one of Python's."""
    if kind is None or kind.number is None:
        return torch.float32
    return torch.float64 if kind.number is float else torch.int64


def _as_kept(tensor: torch.Tensor, kind: StateKind | None) -> Any:
    """Return a state as the optimizer keeps it: a number of Python, or a tensor of its own."""
    if kind is not None and kind.number in (bool, int, float) and tensor.ndim == 0:
        return kind.number(tensor.item())
    return tensor.clone()


def _read_tensors(
    checkpoint: Path, parallelized: ParallelizedModel, tensors: dict[str, torch.Tensor]
) -> None:
    """Read into `tensors`. A conversion writes packed parameters in one piece: each rank reads these completely, one
    after the other into host memory, and keeps its shard."""
    shapes = _stored_shapes(checkpoint)
    in_one_piece = {
        n: t for n, t in tensors.items() if n in shapes and _packing(parallelized, n, t) is not None
    }
    others = {name: tensor for name, tensor in tensors.items() if name not in in_one_piece}
    try:
        with dcp_errors():
            dcp.load(dict(_unpacked(parallelized, others)), checkpoint_id=checkpoint / FOLDER)
        for name, tensor in sorted(in_one_piece.items()):
            full = torch.empty(shapes[name], dtype=tensor.dtype)
            with dcp_errors(), warnings.catch_warnings():
                # `no_dist` is intended
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                dcp.load({name: full}, checkpoint_id=checkpoint / FOLDER, no_dist=True)
            copy_local_shard(tensor, full)
    except PROGRAM_ERRORS:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        raise CheckpointError(
            f"{checkpoint} does not hold this model ({cause}): resume with the model that wrote it, or start from "
            "scratch with --resume_from_checkpoint false"
        ) from error


def _stored_names(checkpoint: Path) -> set[str]:
    """Return the names of a checkpoint's tensors; a packed one counts as a single tensor."""
    return {name.split(PART)[0] for name in _stored_shapes(checkpoint)}


def _stored_shapes(checkpoint: Path) -> dict[str, torch.Size]:
    stored = FileSystemReader(checkpoint / FOLDER).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in stored.items() if hasattr(entry, "size")}


def _optimized_parameters(
    parallelized: ParallelizedModel, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parallelized.model.named_parameters():
        if id(parameter) in optimized:
            yield _canonical_name(parallelized, name), parameter


def _canonical_name(parallelized: ParallelizedModel, name: str) -> str:
    """Return the name of a parameter in the unsplit model: a tied head has the embedding's."""
    if parallelized.structure.tied and name == f"{parallelized.structure.head}.weight":
        return f"{parallelized.structure.token_embedding}.weight"
    return name


def _unpacked(
    parallelized: ParallelizedModel, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor as one rectangle of a complete one: a packed parameter as its matrices, sharing its memory."""
    for name, tensor in tensors.items():
        packing = _packing(parallelized, name, tensor)
        if packing is None:
            yield name, tensor
        else:
            yield from (
                (f"{name}{PART}{number}", part)
                for number, part in enumerate(_matrices(tensor, packing))
            )


def _packing(
    parallelized: ParallelizedModel, name: str, tensor: torch.Tensor
) -> PackedParameter | None:
    if tensor.ndim == 0:
        return None
    return next((p for own, p in parallelized.packed.items() if f".{own}." in f".{name}."), None)


def _matrices(tensor: torch.Tensor, packing: PackedParameter) -> list[torch.Tensor]:
    pieces = local_tensor(tensor).chunk(packing.parts, dim=packing.dim)
    if not isinstance(tensor, DTensor):
        return list(pieces)
    shape = list(tensor.shape)
    shape[packing.dim] //= packing.parts
    stride = torch.empty(shape, device="meta").stride()
    # Strided shards of the packed parameter are plain shards of each matrix.
    placements = [
        Shard(packing.dim) if shard_dim(p) == packing.dim else p for p in tensor.placements
    ]
    return [
        DTensor.from_local(
            piece,
            tensor.device_mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
        for piece in pieces
    ]


# --- a model for `from_pretrained` -----------------------------------------------------------------------------------


def write_weights(
    folder: Path,
    parallelized: ParallelizedModel,
    mesh: ParallelMesh,
    *,
    saved_adapters: Mapping[str, str] | None = None,
) -> None:
    """Write the model's safetensors files and their index, or an adapter's single file. Call it on every rank.

    One rank of each pipeline rank writes its stages' files. Its host memory has to hold the tensors of one file, or of
    one layer where that is more.

    Args:
        folder (`Path`): an existing folder.
        parallelized (`ParallelizedModel`): the model.
        mesh (`ParallelMesh`): all ranks.
        saved_adapters (`Mapping`, *optional*): the result of `hfscale.parallel.adapters.saved_names`, to write the
            adapter only.
    """
    is_writer = mesh.data_rank == mesh.cp_rank == mesh.tp_rank == 0
    if saved_adapters is not None:
        _write_adapter(folder, parallelized, saved_adapters, is_writer=is_writer)
        return
    index: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(_files(parallelized)):
        if not is_writer:
            continue
        tensors = revert_weight_conversion(parallelized.model, tensors)
        name = f"model-{mesh.pp_rank:05d}-{number:05d}.safetensors"
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()},
            folder / name,
            {"format": "pt"},
        )
        index |= dict.fromkeys(tensors, name)
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    indexes = TRAINING.gather("index of the exported weights", [index, size])
    if distributed.rank() == 0:
        # A weight that two stages hold (a tied one) is in two files; the index names the first.
        weight_map = {key: name for index, _ in reversed(indexes) for key, name in index.items()}
        content = {
            "metadata": {"total_size": sum(size for _, size in indexes)},
            "weight_map": weight_map,
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(
            json.dumps(content, indent=1) + "\n", encoding="utf-8"
        )
    TRAINING.barrier("exported weights are written")


def _files(parallelized: ParallelizedModel) -> Iterator[dict[str, torch.Tensor]]:
    """Yield full tensors in host memory, file by file; a layer is never in two files. Every rank of a stage has to
    iterate over all of them, because gathering a tensor is a collective."""
    gathered: dict[str, torch.Tensor] = {}
    size = 0
    previous = None
    for name, tensor in model_tensors(parallelized).items():
        layer = parallelized.structure.layer_of(name)
        if size > _FILE_BYTES and layer != previous:
            yield gathered
            gathered = {}
            size = 0
        gathered[name] = _full_tensor(tensor)
        size += gathered[name].numel() * gathered[name].element_size()
        previous = layer
    if gathered:
        yield gathered


def _write_adapter(
    folder: Path,
    parallelized: ParallelizedModel,
    saved_adapters: Mapping[str, str],
    *,
    is_writer: bool,
) -> None:
    """Write what PEFT saves of an adapter, under PEFT's names. Each rank contributes what its stages hold."""
    reshard_all(parallelized)
    model = parallelized.model
    own = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name in saved_adapters:
            own[saved_adapters[name]] = _full_tensor(tensor).contiguous()
    packed = safetensors.torch.save(own if is_writer else {})
    gathered = [
        safetensors.torch.load(data) for data in TRAINING.gather_bytes("exported adapters", packed)
    ]
    if distributed.rank() == 0:
        named: dict[str, torch.Tensor] = {}
        for tensors in gathered:
            named |= tensors
        missing = set(saved_adapters.values()) - named.keys()
        assert not missing, missing  # a stage holds each of them
        save_file(named, folder / ADAPTER_FILE, {"format": "pt"})
    TRAINING.barrier("exported adapters are written")


def _full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


# --- the Trainer's side ----------------------------------------------------------------------------------------------


def restore_scheduler(scheduler: Any, saved: dict[str, Any]) -> None:
    """Restore the position and base learning rate of a checkpoint that does not have them by name.

    Earlier versions of this package wrote such checkpoints: two entries in each list of scheduler.pt, whatever groups
    the optimizer had.

    Args:
        scheduler (`LRScheduler`): the new scheduler; it is stepped to the saved position.
        saved (`dict`): the `state_dict()` of another scheduler, which may have another number of parameter groups.
    """
    if len(set(saved["base_lrs"])) == 1:
        scheduler.base_lrs = saved["base_lrs"][:1] * len(scheduler.base_lrs)
        for group in scheduler.optimizer.param_groups:
            group["initial_lr"] = saved["base_lrs"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the scheduler steps before the optimizer
        for _ in range(saved["last_epoch"]):
            scheduler.step()


def has_training_state(checkpoint: Path) -> bool:
    """Return whether a checkpoint has an optimizer or a schedule, which `save_only_model` leaves out.

    Args:
        checkpoint (`Path`): the checkpoint's folder.
    """
    if (checkpoint / SCHEDULER_NAME).is_file():
        return True
    return any(name.startswith("optimizer.") for name in _stored_shapes(checkpoint))


class ParallelCheckpointTrainer(Trainer):
    """The part of `ParallelTrainer` that writes and reads checkpoints.

    The methods with an underscore override Trainer's own steps of saving and resuming, for which there are no public
    hooks; test_parallel_plan.py::test_internals_of_libraries_are_where_this_package_uses_them fails when they
    move.
    """

    parallelized: ParallelizedModel
    layout: ParallelLayout
    mesh: ParallelMesh
    parameter_names: ParameterNames
    """Names of the trained parameters of the unsplit model, by Trainer's own groups."""
    parameter_order: list[str]
    """Names of all its parameters, in its order."""
    _unsplit: nn.Module | None = None
    """The unsplit model without data, where an overridden `create_optimizer` has to be asked about it."""
    _composition: list[Group] | None = None
    """The groups that the optimizer of one process would have; None where it is not known."""
    _tried: torch.optim.Optimizer | None = None
    """The optimizer of which `check_update` has found out how it steps."""
    _state_kinds: Mapping[str, StateKind]
    """How it keeps its states, by their key."""
    _made: list[Group] | None = None
    """The groups of this rank's optimizer as it was made."""
    _groups: list[Group] | None = None
    """The optimizer's groups in the unsplit model at the beginning of the training or at the last save."""
    saved_adapters: dict[str, str] | None = None
    """Of a model with adapters: the result of `hfscale.parallel.adapters.saved_names`."""
    _cached_model_files: dict[str, bytes] | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as Trainer does; a checkpoint of another strategy (DDP, FSDP2, ZeRO …) is converted first.

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*): as for `Trainer.train`.
            args, kwargs: as for `Trainer.train`.

        Returns:
            The `TrainOutput` of `Trainer.train`.

        Raises:
            LayoutError: the checkpoint cannot be converted.
            CheckpointError: the checkpoint is broken, has no manifest from which it could be converted, or does not
                hold this model.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str):
            resume_from_checkpoint = readable_checkpoint(
                self.args, resume_from_checkpoint, strategy="parallel"
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    # --- the optimizer's groups -------------------------------------------------------------------------------------

    def begin_optimizer(self) -> None:
        """Ask which groups the optimizer of one process would have. Call it before Trainer makes the optimizer."""
        self._groups = None
        self._made = None
        if self.optimizer is None:
            self._check_trained_stages()
            composition = self._groups_of_one_process()
            are_known = TRAINING.gather("groups of one process", composition is not None)
            self._composition = composition if all(are_known) else None

    def _check_trained_stages(self) -> None:
        """Check that each rank has parameters of which a `create_optimizer` of the user's can make an optimizer."""
        trains = any(p.requires_grad for p in self.parallelized.model.parameters())
        are_trained = TRAINING.gather("this rank trains parameters", trains)
        if self._unsplit is None or all(are_trained):
            return
        stage_ranks = self.layout.world_size // self.layout.pp
        raise UsageError(
            f"pipeline rank {are_trained.index(False) // stage_ranks} has no trained parameters, of which "
            f"create_optimizer could make an optimizer: set {spelled('pp_size', 1)}, or train a part of every stage"
        )

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Note the options of the optimizer, which has been made and has no scheduler yet that changes them.

        Trainer would send rank 0's plain parameters to all ranks, which hold other parameters.
        """
        with TRAINING.agreed("groups of the new optimizer are named"):
            self._made = groups_of_rank(self._torch_optimizer, None, self._names_of_rank())

    def _groups_of_one_process(self) -> list[Group] | None:
        """Return the groups that the optimizer of one process would have, from whoever makes it."""
        if self._unsplit is not None:
            return groups_of_one_process(self, self._unsplit, self.parameter_order)
        decays = (self.args.weight_decay, 0.0)
        return [
            Group(names=names, options={"weight_decay": decay})
            for names, decay in zip(self.parameter_names.groups, decays, strict=True)
        ]

    def check_optimizer(self) -> None:
        """Check the optimizer and its schedule, once when a training begins and before a checkpoint is read.

        Raises:
            UsageError: ranks do not agree about a parameter, it has other options than in one process, or checkpoints
                will be written and cannot have everything that a resume needs.
        """
        if self._groups is not None:
            return
        optimizer = self._torch_optimizer
        saves = self.args.save_strategy != "no" or TrainerAdapter.of(self).announced.callback_saves
        # On every rank, so that all end with the error of the first one
        saves = saves and not self.args.save_only_model
        with TRAINING.agreed("optimizer can be saved"):
            check_schedule(optimizer, self.lr_scheduler)
            if saves:
                check_storable(optimizer, self.lr_scheduler)
            if self._tried is not optimizer:  # a second training goes on with its states
                self._state_kinds = check_update(optimizer, stages=self.layout.pp, saves=saves)
                self._tried = optimizer
        if self._unsplit is not None and self._composition is not None and self._made is not None:
            made = exchange_groups(self._made, self.mesh)
            of_ranks = [group for groups in made for group in groups]
            check_as_in_one_process(of_ranks, self._composition)
        self.exchange_groups()

    def exchange_groups(self) -> None:
        """Put the optimizer's groups together for the next checkpoint. Every rank must call it, between two steps.

        Raises:
            UsageError: ranks that hold the same parameter step it with different options.
        """
        with TRAINING.agreed("groups of the optimizer are named"):
            own = groups_of_rank(self._torch_optimizer, self.lr_scheduler, self._names_of_rank())
        by_stage = exchange_groups(own, self.mesh)
        self._groups = unsplit_groups(by_stage, self._composition, self.parameter_order)

    def _names_of_rank(self) -> dict[int, str]:
        reshard_all(self.parallelized)
        full = {name.removeprefix(ADAPTER_PREFIX): name for name in self.parameter_order}
        names = {}
        for name, parameter in self.parallelized.model.named_parameters():
            stored = _canonical_name(self.parallelized, name)
            names[id(parameter)] = full.get(stored, stored)
        return names

    # --- writing ----------------------------------------------------------------------------------------------------

    def sharded_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Collect the tensors that this rank writes: the model, and the optimizer's state unless `save_only_model`.

        They share the training's memory: copy them before the next step.

        Returns:
            Subfolder of the checkpoint -> name -> tensor.
        """
        optimizer = None if self.args.save_only_model else self._torch_optimizer
        saved = self.saved_adapters or ()
        return {FOLDER: stored_tensors(self.parallelized, optimizer, saved=saved)}

    def name_in_one_process(self, name: str) -> str:
        """Return the name of a parameter in the unsplit model: a tied head has the embedding's.

        Args:
            name (`str`): its name in the model of this rank, without the wrappers of adapters.
        """
        return _canonical_name(self.parallelized, name)

    def checkpoint_files(self) -> dict[str, bytes]:
        """Make the small files that the main process writes in addition to the tensors, from the current state.

        Returns:
            Path relative to the checkpoint's folder -> content.
        """
        assert self._groups is not None  # exchanged before each save
        files = dict(self._model_files())
        if not self.args.save_only_model:
            files[SCHEDULER_NAME] = self._scheduler_file(self._groups)
        names = replace(self.parameter_names, groups=[group.names for group in self._groups])
        files[PARAMETERS_NAME] = names.to_json().encode()
        metadata = ParallelMetadata(
            layout=asdict(self.layout),
            packed={name: packed.dim for name, packed in self.parallelized.packed.items()},
            groups=[group.options for group in self._groups],
            by_name=True,
            adapters=self.saved_adapters or {},
        )
        return files | {PARALLEL_NAME: metadata.to_json().encode()}

    @property
    def _torch_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside of Accelerate's wrapper."""
        assert isinstance(self.optimizer, AcceleratedOptimizer)  # Trainer has prepared it
        optimizer: torch.optim.Optimizer = self.optimizer.optimizer
        return optimizer

    def _scheduler_file(self, groups: list[Group]) -> bytes:
        """Return scheduler.pt with an entry for each group of the unsplit model in its lists."""
        assert self.lr_scheduler is not None  # Trainer makes it before the first save
        entries = [group.entries for group in groups]
        own = len(self._torch_optimizer.param_groups)
        return packed_state(with_group_entries(self.lr_scheduler.state_dict(), own, entries))

    def _model_files(self) -> dict[str, bytes]:
        """Return the files of the config (or the adapter's config) and the tokenizer. They are cached, because they do
        not change and a large vocabulary takes long to write."""
        if self._cached_model_files is None:
            self._cached_model_files = model_files(self)
        return self._cached_model_files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for `from_pretrained`. When Trainer calls it to save a checkpoint, write the model and the
        optimizer as a checkpoint instead.

        Args:
            output_dir (`str`, *optional*): the folder; absent: the run's `output_dir`.
            _internal_call (`bool`): whether Trainer is saving a checkpoint.
        """
        chosen = output_dir or self.args.output_dir
        assert chosen is not None  # TrainingArguments has a default
        folder = Path(chosen)
        folder.mkdir(parents=True, exist_ok=True)
        if _internal_call:
            self.exchange_groups()
            for name, tensors in self.sharded_state().items():
                save_shards(tensors, folder / name, TRAINING)
        else:
            write_weights(folder, self.parallelized, self.mesh, saved_adapters=self.saved_adapters)
        if self.args.should_save:
            for name, content in (
                self.checkpoint_files() if _internal_call else self._model_files()
            ).items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: `save_model` has written them with the model."""

    # --- reading ----------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not (Path(resume_from_checkpoint) / FOLDER).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} was not written by ParallelTrainer and has no manifest: convert it with "
                f"`hfscale checkpoints convert {resume_from_checkpoint} NEW_FOLDER --to parallel`, start from the "
                "weights of a model folder with --model_name_or_path, or start from scratch with "
                "--resume_from_checkpoint false"
            )
        # Raises if the checkpoint is broken, before any tensor is read.
        read_parallel_metadata(Path(resume_from_checkpoint))
        load_model(Path(resume_from_checkpoint), self.parallelized, saved=self.saved_adapters or ())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.check_optimizer()
        folder = Path(checkpoint)
        if not has_training_state(folder):
            # As Trainer does it with a checkpoint of save_only_model
            logger.warning(
                "%s has neither optimizer nor schedule, as save_only_model leaves it: training continues at its step "
                "with a new optimizer and a learning rate schedule that begins anew",
                folder,
            )
            return
        load_optimizer(folder, self.parallelized, self._torch_optimizer, self._state_kinds)
        if read_parallel_metadata(folder).by_name:
            groups = self._torch_optimizer.param_groups
            names = self._names_of_rank()
            names_by_group = [[names[id(p)] for p in group["params"]] for group in groups]
            restore_groups(folder, groups, names_by_group, self.lr_scheduler)
        else:
            restore_scheduler(self.lr_scheduler, load_archive(folder / SCHEDULER_NAME))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore each rank's own random state. In another layout all ranks get that of the first rank: they all
        started with one seed, and ranks that share a matrix must drop out the same elements."""
        if checkpoint is None or read_parallel_metadata(Path(checkpoint)).layout == asdict(
            self.layout
        ):
            super()._load_rng_state(checkpoint)
            return
        with tempfile.TemporaryDirectory() as folder:
            copy_first_rng_state(
                Path(checkpoint), Path(folder) / rng_name(self), world_size=self.args.world_size
            )
            super()._load_rng_state(folder)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
