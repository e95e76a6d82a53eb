"""Trainer's own files, as one process or DDP's rank 0 writes them: model.safetensors and optimizer.pt."""

from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.formats.archives import load_archive
from hfscale.checkpoint.formats.merged import merge
from hfscale.checkpoint.formats.parameter_names import ParameterNames, model_of_config, read_parameter_names
from hfscale.checkpoint.formats.safetensors_files import read_weights, write_weights
from hfscale.checkpoint.formats.view import CheckpointView, ParameterGroup, TensorRef, canonical_name
from hfscale.errors import CheckpointError

OPTIMIZER_NAME = "optimizer.pt"
_SCRATCH_NAME = ".optimizer-scratch"


def read_whole(checkpoint: Path) -> CheckpointView:
    """The view of a checkpoint of `single` or `ddp`.

    Raises:
        CheckpointError: a file is missing or broken, or the optimizer's parameters cannot be told apart.
    """
    weights = read_weights(checkpoint, "model") or read_weights(checkpoint, "adapter_model")
    if weights is None:
        raise CheckpointError(f"{checkpoint} has neither model.safetensors nor adapter_model.safetensors")
    weights = {canonical_name(name): ref for name, ref in weights.items()}
    optimizer = load_archive(checkpoint / OPTIMIZER_NAME)
    names = read_parameter_names(checkpoint)
    numbers = _numbers(checkpoint, optimizer, names)
    if not any(name.startswith("base_model.model.") for name in weights):
        weights = _as_in_memory(checkpoint, weights, names)
    state = {
        numbers[number]: {key: _ref(value) for key, value in values.items() if value is not None}
        for number, values in optimizer["state"].items()
    }
    groups = [
        ParameterGroup(
            options={key: value for key, value in group.items() if key != "params"}, names=list(group_names)
        )
        for group, group_names in zip(optimizer["param_groups"], names.groups, strict=True)
    ]
    aliases = {alias: name for alias, name in names.aliases.items() if name in weights and alias not in weights}
    return CheckpointView(weights=weights, groups=groups, state=state, aliases=aliases)


def _as_in_memory(checkpoint: Path, weights: dict[str, TensorRef], names: ParameterNames) -> dict[str, TensorRef]:
    """The weights under the names that the optimizer's parameters have: `save_pretrained` renames some of them."""
    steps = {names.aliases.get(name, name) for group in names.groups for name in group}
    return weights if steps <= weights.keys() else merge(weights, model_of_config(checkpoint))


def _numbers(checkpoint: Path, optimizer: Any, names: ParameterNames) -> dict[int, str]:
    try:
        groups = [group["params"] for group in optimizer["param_groups"]]
    except (KeyError, TypeError):
        raise CheckpointError(f"{checkpoint / OPTIMIZER_NAME} is not the state of a torch optimizer") from None
    if [len(group) for group in groups] != [len(group) for group in names.groups]:
        raise CheckpointError(
            f"{checkpoint / OPTIMIZER_NAME} has groups of {[len(group) for group in groups]} parameters, the model of "
            f"{[len(group) for group in names.groups]}: its optimizer was not grouped as Trainer does it, and the "
            "checkpoint does not name its parameters"
        )
    pairs = zip(groups, names.groups, strict=True)
    return {number: name for ids, group in pairs for number, name in zip(ids, group, strict=True)}


def _ref(value: Any) -> TensorRef:
    return TensorRef.of(value if isinstance(value, torch.Tensor) else torch.tensor(float(value)))


def write_whole(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write the files that Trainer reads under `single` and `ddp`."""
    is_adapter = any(name.startswith("base_model.model.") for name in view.weights)
    weights = {name: ref for name, ref in view.weights.items() if name not in view.aliases}
    write_weights(folder, "adapter_model" if is_adapter else "model", weights)
    names = [name for group in view.groups for name in group.names]
    order = {name: number for number, name in enumerate(names)}
    with _scratch(folder) as scratch:
        state = {
            order[name]: {key: scratch.keep(ref) for key, ref in view.state[name].items()}
            for name in names
            if name in view.state
        }
        groups = [group.options | {"params": [order[name] for name in group.names]} for group in view.groups]
        torch.save({"state": state, "param_groups": groups}, folder / OPTIMIZER_NAME)


class _scratch:  # noqa: N801 - used like a function
    """Tensors for one `torch.save`, which wants them all at once, in a file instead of in memory."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _SCRATCH_NAME
        self._number = 0

    def __enter__(self) -> "_scratch":
        self._path.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._path.iterdir():
            path.unlink()
        self._path.rmdir()

    def keep(self, ref: TensorRef) -> torch.Tensor:
        """The tensor, mapped from a file that it has just been written to; small ones stay in memory."""
        tensor = ref.read()
        if ref.bytes <= 2**16:
            return tensor.clone()
        self._number += 1
        path = self._path / str(self._number)
        elements = tensor.numel()
        mapped = torch.from_file(str(path), shared=True, size=elements, dtype=tensor.dtype)
        mapped.copy_(tensor.reshape(-1))
        return mapped.view(tensor.shape)
