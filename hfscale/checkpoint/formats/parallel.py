"""The format of `ParallelTrainer` and of native sharding: a torch distributed checkpoint (DCP) and two JSON files.

The tensors have canonical names.

    dcp/                     model.<parameter>, optimizer.<parameter>.<state>; parts of a merged matrix end in @0, @1 …
    hfscale_parallel.json    the layout of the run, how merged matrices are assembled, the optimizer's options
    hfscale_parameters.json  parameter names by group, and second names of tied weights, as in every checkpoint

Names are those of the model without the wrappers of adapters: `model.layers.0.self_attn.q_proj.lora_A.default.weight`
is what the optimizer of any other strategy calls `base_model.model.model.layers.0…`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.formats.dcp import save_refs, tensor_ref
from hfscale.checkpoint.formats.format import Format, Origin
from hfscale.checkpoint.formats.parameter_names import read_parameter_names
from hfscale.checkpoint.formats.view import (
    CheckpointView,
    ParameterGroup,
    TensorRef,
    check_names,
    saved_name,
    saved_names,
)
from hfscale.checkpoint.pickles import Entry, load_archive, read_dcp_metadata
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError
from hfscale.trainer.parameter_groups import (
    entries_by_group,
    is_storable,
    plain,
    restore_options,
    with_entries,
)

FOLDER = "dcp"
"""Folder of a checkpoint that holds the tensors."""
PART = "@"
"""Separates the name of a matrix that is stored in parts from the number of the part."""
PARALLEL_NAME = "hfscale_parallel.json"
_FORMAT = 1
_EARLIER_VERSION_NAME = "scheduler.json"  # written by the versions before this format
ADAPTER_PREFIX = "base_model.model."
"""What PEFT puts before the names of a model's parameters."""


@dataclass(frozen=True, kw_only=True)
class ParallelMetadata:
    """The content of `hfscale_parallel.json`."""

    layout: dict[str, int] | None
    """Sizes of the parallel axes of the run that wrote the checkpoint; None if a conversion wrote it."""
    packed: dict[str, int] = field(default_factory=dict)
    """Names of the matrices that are stored in parts -> the dimension along which the parts are concatenated."""
    groups: list[dict[str, Any]]
    """Options of the optimizer's parameter groups, without `params`: of those of `hfscale_parameters.json`, in their
    order."""
    by_name: bool = False
    """Whether `groups` and the lists of scheduler.pt are what each parameter was trained with. Earlier versions of
    `ParallelTrainer` wrote the first group's for all, with another weight decay."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Names of the tensors of an adapter -> the names under which PEFT saves them; empty in earlier versions."""

    def to_json(self) -> str:
        """Return the content of the file."""
        groups = [
            {key: plain(value) for key, value in group.items() if is_storable(value)}
            for group in self.groups
        ]
        fields: dict[str, Any] = {
            "format": _FORMAT,
            "layout": self.layout,
            "packed": self.packed,
            "groups": groups,
            "by_name": self.by_name,
        }
        if self.adapters:
            fields["adapters"] = self.adapters
        return json.dumps(fields) + "\n"


def _with_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples, which optimizers have more often, in the place of lists."""
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    return value


def read_parallel_metadata(checkpoint: Path) -> ParallelMetadata:
    """Read `hfscale_parallel.json`, which `ParallelTrainer` or a conversion has written.

    Raises:
        CheckpointError: the file is missing or broken.
    """
    path = checkpoint / PARALLEL_NAME
    try:
        fields = read_json(path)
        if fields["format"] != _FORMAT:
            raise CheckpointError(
                f"{path} has format {fields['format']}, this version of hfscale reads {_FORMAT}"
            )
        groups = [
            {key: _with_tuples(value) for key, value in group.items()} for group in fields["groups"]
        ]
        packed = {str(name): int(dim) for name, dim in fields["packed"].items()}
        adapters = dict(fields.get("adapters", {}))
        return ParallelMetadata(
            layout=fields["layout"],
            packed=packed,
            groups=groups,
            by_name=bool(fields.get("by_name", False)),
            adapters=adapters,
        )
    except FileNotFoundError:
        if (checkpoint / _EARLIER_VERSION_NAME).is_file():
            raise CheckpointError(
                f"{checkpoint} was written by an earlier version of hfscale (it has a {_EARLIER_VERSION_NAME}): "
                "resume with that version, or start from scratch with --resume_from_checkpoint false"
            ) from None
        raise CheckpointError(
            f"{checkpoint} has no {PARALLEL_NAME}: ParallelTrainer did not finish it"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from None


def restore_groups(
    checkpoint: Path,
    groups: Sequence[dict[str, Any]],
    names_by_group: Sequence[Sequence[str]],
    scheduler: Any,
) -> None:
    """Restore the options of an optimizer's groups, and its scheduler, by the names of the parameters.

    Args:
        checkpoint (`Path`): a checkpoint in the format of `hfscale.checkpoint.formats.parallel`.
        groups (`Sequence[dict]`): the optimizer's `param_groups`; changed in place.
        names_by_group (`Sequence[Sequence[str]]`): the names of the parameters of each.
        scheduler (`LRScheduler`): its scheduler.

    Raises:
        CheckpointError: a file is broken, or a group has parameters that had different options, or that were in no
            group.
    """
    stored = read_parameter_names(checkpoint).groups
    metadata = read_parallel_metadata(checkpoint)
    if len(stored) != len(metadata.groups):
        raise CheckpointError(
            f"{checkpoint} has the options of {len(metadata.groups)} parameter groups and the names of {len(stored)}"
        )
    state = load_archive(checkpoint / "scheduler.pt")
    entries = entries_by_group(state, len(stored))
    kinds = [
        [options, of_group] for options, of_group in zip(metadata.groups, entries, strict=True)
    ]
    number_of = {
        name.removeprefix(ADAPTER_PREFIX): number
        for number, names in enumerate(stored)
        for name in names
    }
    numbers = []
    for position, (group, names) in enumerate(zip(groups, names_by_group, strict=True)):
        found = {number_of.get(name.removeprefix(ADAPTER_PREFIX), -1) for name in names}
        if not found:  # this rank has none of its parameters
            found = {position if len(groups) == len(stored) else 0}
        number = min(found)
        if number < 0 or any(kinds[other] != kinds[number] for other in found):
            raise CheckpointError(
                f"{checkpoint} was saved with other parameter groups than this optimizer has, such as that of "
                f"'{names[0]}': resume with the same trained parameters and optimizer"
            )
        # What a conversion has written may have options of another library's optimizer
        adds = metadata.layout is not None
        restore_options(group, metadata.groups[number], adds=adds)
        numbers.append(number)
    scheduler.load_state_dict(with_entries(state, len(stored), numbers))


def read_parallel(checkpoint: Path) -> CheckpointView:
    """Return the view of a checkpoint of `ParallelTrainer` with any layout.

    Raises:
        CheckpointError: a file is missing or broken, or the dimension of a matrix that is stored in parts is unknown.
    """
    folder = checkpoint / FOLDER
    names = read_parameter_names(checkpoint)
    metadata = read_parallel_metadata(checkpoint)
    if len(names.groups) != len(metadata.groups):
        raise CheckpointError(
            f"{checkpoint / PARALLEL_NAME} has the options of {len(metadata.groups)} parameter groups, "
            f"{PARAMETERS_NAME} has {len(names.groups)} groups"
        )
    parameters = {
        name.removeprefix(ADAPTER_PREFIX): name for group in names.groups for name in group
    }
    weights: dict[str, TensorRef] = {}
    state: dict[str, dict[str, TensorRef]] = {}
    for name, ref in _full_tensors(folder, read_dcp_metadata(folder), metadata.packed).items():
        kind, _, own = name.partition(".")
        if kind == "model":
            usual = saved_name(parameters.get(own, own))
            weights[metadata.adapters.get(own, usual)] = ref
            continue
        own, _, key = own.rpartition(".")
        if own not in parameters:
            raise CheckpointError(
                f"{folder} has states of '{own}', which is in none of the optimizer's groups"
            )
        state.setdefault(parameters[own], {})[key] = ref
    check_names([*weights, *state])
    groups = list(map(ParameterGroup.of, metadata.groups, names.groups))
    aliases = {
        alias: name
        for alias, name in names.aliases.items()
        if name in weights and alias not in weights
    }
    return CheckpointView(weights=weights, groups=groups, state=state, aliases=aliases)


def _full_tensors(
    folder: Path, entries: Mapping[str, Entry], packed: Mapping[str, int]
) -> dict[str, TensorRef]:
    """Return every tensor by name; a matrix that is stored in parts is concatenated when it is read."""
    full: dict[str, TensorRef] = {}
    parts: dict[str, dict[int, TensorRef]] = {}
    for name, entry in entries.items():
        if entry.shape is None:
            continue
        base, mark, number = name.rpartition(PART)
        if not mark:
            full[name] = tensor_ref(folder, name, entry)
        elif not number.isdecimal():
            raise CheckpointError(
                f"{folder} names a tensor '{name[:80]}', which is not a part of a matrix"
            )
        else:
            parts.setdefault(base, {})[int(number)] = tensor_ref(folder, name, entry)
    for base, numbered in parts.items():
        own = base.partition(".")[2]
        dim = packed.get(own, packed.get(own.rpartition(".")[0]))
        if dim is None or sorted(numbered) != list(range(len(numbered))):
            raise CheckpointError(
                f"{folder}: the parts {sorted(numbered)} of '{base}' do not make up a complete matrix"
            )
        full[base] = _concatenated([ref for _, ref in sorted(numbered.items())], dim)
    return full


def _concatenated(parts: Sequence[TensorRef], dim: int) -> TensorRef:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)

    def read() -> torch.Tensor:
        full = torch.empty(shape, dtype=parts[0].dtype)
        start = 0
        for part in parts:
            full.narrow(dim, start, part.shape[dim]).copy_(part.read())
            start += part.shape[dim]
        return full

    return TensorRef(shape=tuple(shape), dtype=parts[0].dtype, read=read)


def write_parallel(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write what `ParallelTrainer` reads with any layout: every tensor unsharded, under its canonical name.

    Args:
        view (`CheckpointView`): what is written.
        folder (`Path`): folder of the new checkpoint.

    Raises:
        CheckpointError: the name of a parameter is not plain (see `check_names`).
    """
    tensors: dict[str, TensorRef] = {}
    trained: dict[str, str] = {}
    for group in view.groups:
        for name in group.names:
            trained |= dict.fromkeys(saved_names(name), name)
    for name, ref in view.weights.items():
        if name not in view.aliases:
            tensors[f"model.{trained.get(name, name).removeprefix(ADAPTER_PREFIX)}"] = ref
    for name, keys in view.state.items():
        tensors |= {
            f"optimizer.{name.removeprefix(ADAPTER_PREFIX)}.{key}": ref for key, ref in keys.items()
        }
    check_names([name for group in view.groups for name in group.names])
    save_refs(folder / FOLDER, tensors)
    metadata = ParallelMetadata(
        layout=None, groups=[group.options for group in view.groups], by_name=True
    )
    (folder / PARALLEL_NAME).write_text(metadata.to_json(), encoding="utf-8")


def _wrote(checkpoint: Path) -> bool:
    return (checkpoint / FOLDER).is_dir() and (checkpoint / PARALLEL_NAME).is_file()


def _origin(checkpoint: Path, world_size: int) -> Origin:
    return Origin(strategy="parallel")


FORMAT = Format(
    name="parallel",
    label="PARALLEL",
    wrote=_wrote,
    origin=_origin,
    read=read_parallel,
    write=write_parallel,
)
