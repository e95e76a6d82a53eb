"""`ParallelTrainer`'s files: one distributed checkpoint (torch DCP) under canonical names, and what it cannot say.

    dcp/                     model.<parameter>, optimizer.<parameter>.<state>; parts of a merged matrix end in @0, @1 …
    hfscale_parallel.json    the layout that wrote it, how merged matrices are put together, the optimizer's options
    hfscale_parameters.json  names by group, and second names of tied weights, as in every checkpoint

Names are those of the model without adapters around it: `model.layers.0.self_attn.q_proj.lora_A.default.weight` is
what the optimizer of any other strategy calls `base_model.model.model.layers.0…`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.dcp_metadata import Entry, read_dcp_metadata
from hfscale.checkpoint.formats.distributed_files import save_refs, tensor_ref
from hfscale.checkpoint.formats.parameter_names import read_parameter_names
from hfscale.checkpoint.formats.view import CheckpointView, ParameterGroup, TensorRef, check_names, saved_name
from hfscale.errors import CheckpointError

FOLDER = "dcp"
"""Where in a checkpoint the tensors lie."""
PART = "@"
"""Follows the name of a matrix that is stored as its parts, before the number of the part."""
PARALLEL_NAME = "hfscale_parallel.json"
_FORMAT = 1
_EARLIER = "scheduler.json"  # of versions before this file
_ADAPTED = "base_model.model."
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True)
class ParallelFacts:
    """What `hfscale_parallel.json` says."""

    layout: dict[str, int] | None
    """Sizes of the axes of the run that wrote it; None: a conversion did."""
    packed: dict[str, int] = field(default_factory=dict)
    """Matrices that are stored as parts -> the dimension along which these follow each other."""
    groups: list[dict[str, Any]]
    """Options of the optimizer's groups, without their parameters."""

    def to_json(self) -> str:
        """The text of the file."""
        groups = [{key: _plain(value) for key, value in group.items() if _is_plain(value)} for group in self.groups]
        fields = {"format": _FORMAT, "layout": self.layout, "packed": self.packed, "groups": groups}
        return json.dumps(fields) + "\n"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def read_facts(checkpoint: Path) -> ParallelFacts:
    """What `ParallelTrainer`, or a conversion, says of the checkpoint.

    Raises:
        CheckpointError: the file is missing or broken.
    """
    path = checkpoint / PARALLEL_NAME
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {fields['format']}, this version of hfscale reads {_FORMAT}")
        groups = [{k: tuple(v) if isinstance(v, list) else v for k, v in group.items()} for group in fields["groups"]]
        packed = {str(name): int(dim) for name, dim in fields["packed"].items()}
        return ParallelFacts(layout=fields["layout"], packed=packed, groups=groups)
    except FileNotFoundError:
        if (checkpoint / _EARLIER).is_file():
            raise CheckpointError(
                f"{checkpoint} was written by an earlier version of hfscale, as its {_EARLIER} says: go on with that "
                "version, or begin afresh with --resume_from_checkpoint false"
            ) from None
        raise CheckpointError(f"{checkpoint} has no {PARALLEL_NAME}: ParallelTrainer did not finish it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__} {error}") from None


def read_parallel(checkpoint: Path) -> CheckpointView:
    """The view of a checkpoint of `ParallelTrainer`, of any layout.

    Raises:
        CheckpointError: a file is missing or broken, or parts of a matrix have no dimension.
    """
    folder, names, facts = checkpoint / FOLDER, read_parameter_names(checkpoint), read_facts(checkpoint)
    if len(names.groups) != len(facts.groups):
        raise CheckpointError(
            f"{checkpoint / PARALLEL_NAME} has options of {len(facts.groups)} groups of parameters, "
            f"not of {len(names.groups)}"
        )
    parameters = {name.removeprefix(_ADAPTED): name for group in names.groups for name in group}
    weights: dict[str, TensorRef] = {}
    state: dict[str, dict[str, TensorRef]] = {}
    for name, ref in _whole_tensors(folder, read_dcp_metadata(folder), facts.packed).items():
        kind, _, own = name.partition(".")
        if kind == "model":
            weights[saved_name(parameters.get(own, own))] = ref
            continue
        own, _, key = own.rpartition(".")
        if own not in parameters:
            raise CheckpointError(f"{folder} has states of '{own}', which stands in none of the optimizer's groups")
        state.setdefault(parameters[own], {})[key] = ref
    check_names([*weights, *state])
    groups = [ParameterGroup(options=o, names=n) for o, n in zip(facts.groups, names.groups, strict=True)]
    aliases = {alias: name for alias, name in names.aliases.items() if name in weights and alias not in weights}
    return CheckpointView(weights=weights, groups=groups, state=state, aliases=aliases)


def _whole_tensors(folder: Path, entries: Mapping[str, Entry], packed: Mapping[str, int]) -> dict[str, TensorRef]:
    """Every tensor, merged ones from their parts."""
    whole: dict[str, TensorRef] = {}
    parts: dict[str, dict[int, TensorRef]] = {}
    for name, entry in entries.items():
        if entry.shape is None:
            continue
        base, mark, number = name.rpartition(PART)
        if not mark:
            whole[name] = tensor_ref(folder, name, entry)
        elif not number.isdigit():
            raise CheckpointError(f"{folder} names a tensor '{name[:80]}', which is no part of a matrix")
        else:
            parts.setdefault(base, {})[int(number)] = tensor_ref(folder, name, entry)
    for base, numbered in parts.items():
        own = base.partition(".")[2]
        dim = packed.get(own, packed.get(own.rpartition(".")[0]))
        if dim is None or sorted(numbered) != list(range(len(numbered))):
            raise CheckpointError(f"{folder}: the parts {sorted(numbered)} of '{base}' do not make up a whole")
        whole[base] = _joined([ref for _, ref in sorted(numbered.items())], dim)
    return whole


def _joined(parts: Sequence[TensorRef], dim: int) -> TensorRef:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)

    def read() -> torch.Tensor:
        whole = torch.empty(shape, dtype=parts[0].dtype)
        start = 0
        for part in parts:
            whole.narrow(dim, start, part.shape[dim]).copy_(part.read())
            start += part.shape[dim]
        return whole

    return TensorRef(shape=tuple(shape), dtype=parts[0].dtype, read=read)


def write_parallel(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write what `ParallelTrainer` reads in any layout: every tensor whole, under its one name."""
    tensors: dict[str, TensorRef] = {}
    stepped = {saved_name(name): name for group in view.groups for name in group.names}
    for name, ref in view.weights.items():
        if name not in view.aliases:
            tensors[f"model.{stepped.get(name, name).removeprefix(_ADAPTED)}"] = ref
    for name, keys in view.state.items():
        tensors |= {f"optimizer.{name.removeprefix(_ADAPTED)}.{key}": ref for key, ref in keys.items()}
    check_names([name for group in view.groups for name in group.names])
    save_refs(folder / FOLDER, tensors)
    facts = ParallelFacts(layout=None, groups=[group.options for group in view.groups])
    (folder / PARALLEL_NAME).write_text(facts.to_json(), encoding="utf-8")
