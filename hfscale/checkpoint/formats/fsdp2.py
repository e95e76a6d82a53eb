"""FSDP2's sharded files, as Accelerate lays them out: two distributed checkpoints (torch DCP) in one folder.

`pytorch_model_fsdp_0` holds {"model": {name: tensor}}, `optimizer_0` {"optimizer": {"state": {name: {key: tensor}},
"param_groups": [{…, "params": [names]}]}}; DCP flattens both to names joined by dots. It is read and written here
without a process group, piece by piece.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.dcp_metadata import Entry, read_dcp_metadata
from hfscale.checkpoint.formats.distributed_files import read_value, save_refs, tensor_ref
from hfscale.checkpoint.formats.view import CheckpointView, ParameterGroup, TensorRef, check_names, saved_name
from hfscale.errors import CheckpointError

MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups."


def read_fsdp2(checkpoint: Path) -> CheckpointView:
    """The view of a checkpoint of `fsdp2`, of any number of ranks, HSDP included.

    Raises:
        CheckpointError: a file is missing, broken or would have to be unpickled.
    """
    model, optimizer = checkpoint / MODEL_FOLDER, checkpoint / OPTIMIZER_FOLDER
    weights = {
        name.removeprefix("model."): tensor_ref(model, name, entry)
        for name, entry in read_dcp_metadata(model).items()
        if entry.shape is not None
    }
    entries = read_dcp_metadata(optimizer)
    groups = _groups(optimizer, entries)
    state: dict[str, dict[str, TensorRef]] = {}
    known = {name for group in groups for name in group.names}
    for name, entry in entries.items():
        if not name.startswith(_STATE):
            continue
        parameter, _, key = name.removeprefix(_STATE).rpartition(".")
        if parameter not in known:
            raise CheckpointError(f"{optimizer} has states of '{parameter}', which stands in none of its groups")
        if entry.shape is None:
            value = torch.tensor(float(read_value(optimizer, entry.chunks[0])))
            state.setdefault(parameter, {})[key] = TensorRef.of(value)
        else:
            state.setdefault(parameter, {})[key] = tensor_ref(optimizer, name, entry)
    check_names([*weights, *known])
    return CheckpointView(weights=weights, groups=groups, state=state)


def _groups(folder: Path, entries: Mapping[str, Entry]) -> list[ParameterGroup]:
    found: dict[int, dict[str, Any]] = {}
    for name, entry in entries.items():
        if name.startswith(_GROUPS):
            number, _, key = name.removeprefix(_GROUPS).partition(".")
            if entry.shape is None:
                found.setdefault(int(number), {})[key] = read_value(folder, entry.chunks[0])
            else:  # a learning rate that is a tensor
                found.setdefault(int(number), {})[key] = tensor_ref(folder, name, entry).read()
    if not found or any("params" not in group for group in found.values()):
        raise CheckpointError(f"{folder} does not say which parameters its groups hold")
    return [
        ParameterGroup(options={k: v for k, v in group.items() if k != "params"}, names=list(group["params"]))
        for _, group in sorted(found.items())
    ]


def write_fsdp2(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write the two distributed checkpoints that Accelerate loads under FSDP2, on any number of ranks."""
    weights = dict(view.weights)
    for alias, name in view.aliases.items():  # FSDP2 asks for both names of a tied weight
        if saved_name(name) in view.weights:  # adapters leave the weights of their base out
            weights.setdefault(alias, view.weights[saved_name(name)])
    save_refs(folder / MODEL_FOLDER, {"model": weights})
    groups = [_with_defaults(group) | {"params": list(group.names)} for group in view.groups]
    save_refs(folder / OPTIMIZER_FOLDER, {"optimizer": {"state": view.state, "param_groups": groups}})


def _with_defaults(group: ParameterGroup) -> dict[str, Any]:
    """DCP asks for every option that the optimizer has, and DeepSpeed's optimizers have fewer than torch's."""
    if "betas" not in group.options:
        return group.options
    defaults = torch.optim.AdamW([torch.zeros(1)]).defaults
    return {name: value for name, value in defaults.items() if name not in group.options} | group.options
