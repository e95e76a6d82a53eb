"""Trainer's own unsharded files, which one process or DDP's rank 0 writes: model.safetensors and optimizer.pt."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.formats.format import Format, Origin
from hfscale.checkpoint.formats.merged import merge
from hfscale.checkpoint.formats.parameter_names import (
    ParameterNames,
    model_of_config,
    read_parameter_names,
)
from hfscale.checkpoint.formats.safetensors_files import read_weights, write_weights
from hfscale.checkpoint.formats.view import (
    CheckpointView,
    ParameterGroup,
    TensorRef,
    canonical_name,
)
from hfscale.checkpoint.pickles import load_archive
from hfscale.errors import CheckpointError

OPTIMIZER_NAME = "optimizer.pt"


def read_unsharded(checkpoint: Path) -> CheckpointView:
    """Return the view of a `single` or `ddp` checkpoint.

    Raises:
        CheckpointError: a file is missing or broken, or the names of the optimizer's parameters cannot be determined.
    """
    weights = read_unsharded_weights(checkpoint)
    weights = {canonical_name(name): ref for name, ref in weights.items()}
    optimizer = load_archive(checkpoint / OPTIMIZER_NAME)
    names = read_parameter_names(checkpoint)
    name_of = _names_by_number(checkpoint, optimizer, names)
    if not any(name.startswith("base_model.model.") for name in weights):
        weights = _as_in_memory(checkpoint, weights, names)
    state = {
        name_of[number]: {key: _ref(value) for key, value in values.items() if value is not None}
        for number, values in optimizer["state"].items()
    }
    groups = list(map(ParameterGroup.of, optimizer["param_groups"], names.groups))
    aliases = {
        alias: name
        for alias, name in names.aliases.items()
        if name in weights and alias not in weights
    }
    return CheckpointView(weights=weights, groups=groups, state=state, aliases=aliases)


def read_unsharded_weights(checkpoint: Path) -> dict[str, TensorRef]:
    """Return the weights of a `single` or `ddp` checkpoint, or of its adapter, by the names in the file.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    weights = read_weights(checkpoint, "model") or read_weights(checkpoint, "adapter_model")
    if weights is None:
        raise CheckpointError(
            f"{checkpoint} has neither model.safetensors nor adapter_model.safetensors"
        )
    return weights


def _as_in_memory(
    checkpoint: Path, weights: dict[str, TensorRef], names: ParameterNames
) -> dict[str, TensorRef]:
    """Return the weights by the names of the optimizer's parameters: `save_pretrained` renames some of them."""
    trained = {names.aliases.get(name, name) for group in names.groups for name in group}
    return weights if trained <= weights.keys() else merge(weights, model_of_config(checkpoint))


def _names_by_number(checkpoint: Path, optimizer: Any, names: ParameterNames) -> dict[int, str]:
    """Return the name of each number that the optimizer's state uses for a parameter."""
    try:
        groups = [group["params"] for group in optimizer["param_groups"]]
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{checkpoint / OPTIMIZER_NAME} is not the state of a torch optimizer"
        ) from None
    if [len(group) for group in groups] != [len(group) for group in names.groups]:
        raise CheckpointError(
            f"{checkpoint / OPTIMIZER_NAME} has groups of {[len(group) for group in groups]} parameters, the model "
            f"has groups of {[len(group) for group in names.groups]}: its optimizer was not grouped as Trainer does "
            "it, and the checkpoint does not name its parameters"
        )
    pairs = zip(groups, names.groups, strict=True)
    return {number: name for ids, group in pairs for number, name in zip(ids, group, strict=True)}


def _ref(value: Any) -> TensorRef:
    return TensorRef.of(value if isinstance(value, torch.Tensor) else torch.tensor(float(value)))


def write_unsharded(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write the files that Trainer reads under `single` and `ddp`.

    Args:
        view (`CheckpointView`): what is written.
        folder (`Path`): existing folder of the new checkpoint.

    Raises:
        CheckpointError: a tensor of `view` cannot be read.
    """
    is_adapter = any(name.startswith("base_model.model.") for name in view.weights)
    weights = {name: ref for name, ref in view.weights.items() if name not in view.aliases}
    write_weights(folder, "adapter_model" if is_adapter else "model", weights)
    names = [name for group in view.groups for name in group.names]
    order = {name: number for number, name in enumerate(names)}
    # `torch.save` needs all tensors at once: they are kept in files instead of in memory.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        state = {
            number: {
                key: _memory_mapped(ref, Path(scratch, f"{number}.{key}"))
                for key, ref in view.state[name].items()
            }
            for name, number in order.items()
            if name in view.state
        }
        groups = [
            group.options | {"params": [order[name] for name in group.names]}
            for group in view.groups
        ]
        torch.save({"state": state, "param_groups": groups}, folder / OPTIMIZER_NAME)


def _memory_mapped(ref: TensorRef, path: Path) -> torch.Tensor:
    """Write a tensor to a file and return it memory-mapped from there; small tensors stay in memory."""
    tensor = ref.read()
    if ref.bytes <= 2**16:
        return tensor.clone()
    mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    mapped.copy_(tensor.reshape(-1))
    return mapped.view(tensor.shape)


def _is_left(checkpoint: Path) -> bool:
    """Return True: what no other format has written."""
    return True


def _origin(checkpoint: Path, world_size: int) -> Origin:
    return Origin(strategy="ddp" if world_size > 1 else "single")


FORMAT = Format(
    name="unsharded",
    label="DDP",
    wrote=_is_left,
    origin=_origin,
    read=read_unsharded,
    write=write_unsharded,
)
