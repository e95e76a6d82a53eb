"""DeepSpeed's files of ZeRO-1, 2 and 3: flat partitions of each rank, cut into parameters by their own description.

ZeRO-1 and 2 lay the parameters of a group end to end and give each rank an equal part of the whole; each file says
which pieces of which parameters it has (`param_slice_mappings`). ZeRO-3 cuts every parameter into equal parts, the
last one padded, and each rank lays its own end to end.

The files hold three small classes of DeepSpeed beside the tensors; stand-ins take their places, so that DeepSpeed is
not needed and none of its code runs.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.formats.archives import load_archive
from hfscale.checkpoint.formats.view import CheckpointView, ParameterGroup, TensorRef, canonical_name, check_names
from hfscale.checkpoint.formats.view import saved_name as saved
from hfscale.errors import CheckpointError

_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_TAG = re.compile(r"[A-Za-z0-9_\-]+")


class _Fragment:
    """`fragment_address`: where a piece lies in a flat partition."""

    numel: int
    start: int


class _Stage(int):
    """`ZeroStageEnum`."""


class _LossScale:
    """Of fp16."""


_ALLOWED: list[Any] = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_LossScale, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_LossScale, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def tag_folder(checkpoint: Path, *, latest: str = "latest") -> Path:
    """The folder of DeepSpeed's files, which the file `latest` names.

    Raises:
        CheckpointError: it is missing or names something else.
    """
    path = checkpoint / latest
    try:
        tag = path.read_text(encoding="utf-8").strip()
    except OSError:
        raise CheckpointError(f"{checkpoint} is not a whole DeepSpeed checkpoint: it has no file '{latest}'") from None
    if not _TAG.fullmatch(tag) or not (checkpoint / tag).is_dir():
        raise CheckpointError(f"{path} names '{tag[:80]}', which is not a folder beside it")
    return checkpoint / tag


def read_zero(checkpoint: Path) -> CheckpointView:
    """The view of a checkpoint of `zero1`, `zero2` or `zero3`, of any number of ranks; fp32 masters are the weights.

    Raises:
        CheckpointError: a file is missing or broken, or it was written with model or pipeline parallelism.
    """
    folder = tag_folder(checkpoint)
    ranks = _rank_files(folder)
    optimizers = [load_archive(path, _ALLOWED)["optimizer_state_dict"] for path in ranks]
    of_stage_3 = "fp32_flat_groups" in optimizers[0]
    name = "zero_pp_rank_{}_mp_rank_00_model_states.pt" if of_stage_3 else "mp_rank_00_model_states.pt"
    models = [load_archive(folder / name.format(rank), _ALLOWED) for rank in range(len(ranks) if of_stage_3 else 1)]
    model = models[0]
    if model.get("mp_world_size", 1) != 1 or (folder / "mp_rank_01_model_states.pt").exists():
        raise CheckpointError(f"{checkpoint} was written with DeepSpeed's model parallelism, which is not converted")
    shapes = [dict(group) for group in model["param_shapes"]]
    if of_stage_3:
        pieces = list(_pieces_of_stage_3(optimizers, shapes))
        frozen = _frozen_of_stage_3(models)
    else:
        pieces = list(_pieces_of_stage_1_and_2(optimizers, shapes))
        frozen = {name: TensorRef.of(tensor) for name, tensor in model["module"].items()}
    aliases = {canonical_name(alias): canonical_name(first) for alias, first in model.get("shared_params", {}).items()}
    weights = {saved(canonical_name(name)): ref for name, ref in frozen.items() if canonical_name(name) not in aliases}
    state: dict[str, dict[str, TensorRef]] = {}
    names: list[list[str]] = []
    for number, part in enumerate(pieces):
        names.append([])
        for name, keys in part.items():
            parameter = canonical_name(name)
            weights[saved(parameter)] = keys.pop("fp32")
            state[parameter] = keys
            names[number].append(parameter)
    check_names([*weights, *state])
    groups = _groups(optimizers[0], names, checkpoint)
    return CheckpointView(weights=weights, groups=groups, state=state, aliases=aliases)


def _rank_files(folder: Path) -> list[Path]:
    found = {int(match[1]): path for path in folder.iterdir() if (match := _RANK_FILE.fullmatch(path.name))}
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{folder} holds the optimizer states of the ranks {sorted(found)}: some are missing")
    return [path for _, path in sorted(found.items())]


def _base_state(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    if not isinstance(base, Mapping) or "state" not in base:
        raise CheckpointError("these DeepSpeed files are of its elastic format, which is not converted")
    return base


def _flat(optimizer: Mapping[str, Any], number: int, masters: str) -> dict[str, Any]:
    """Everything that one rank has of one group: its flat parts by key, and scalars."""
    base = _base_state(optimizer)
    found = {"fp32": optimizer[masters][number], **base["state"].get(number, {})}
    steps = [group["step"] for group in base["param_groups"] if number in group["params"] and "step" in group]
    return {"step": steps[0], **found} if steps else found  # DeepSpeed's own optimizers count per group


def _pieces_of_stage_1_and_2(
    optimizers: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, torch.Size]]
) -> Iterator[dict[str, dict[str, TensorRef]]]:
    for number, group in enumerate(shapes):
        flats = [_flat(optimizer, number, "single_partition_of_fp32_groups") for optimizer in optimizers]
        places = [optimizer["param_slice_mappings"][number] for optimizer in optimizers]
        part = {}
        for name, shape in group.items():
            where = [
                (rank, place[name].start, place[name].numel) for rank, place in enumerate(places) if name in place
            ]
            part[name] = dict(_joined(name, tuple(shape), flats, where))
        yield part


def _pieces_of_stage_3(
    optimizers: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, torch.Size]]
) -> Iterator[dict[str, dict[str, TensorRef]]]:
    ranks = len(optimizers)
    for number, group in enumerate(shapes):
        flats = [_flat(optimizer, number, "fp32_flat_groups") for optimizer in optimizers]
        part, start = {}, 0
        for name, shape in group.items():
            elements = math.prod(shape)
            share = math.ceil(elements / ranks)  # DeepSpeed's: the last rank's is padded
            where = [(rank, start, max(0, min(share, elements - rank * share))) for rank in range(ranks)]
            part[name] = dict(_joined(name, tuple(shape), flats, where))
            start += share
        yield part


def _joined(
    name: str, shape: tuple[int, ...], flats: Sequence[Mapping[str, Any]], where: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[str, TensorRef]]:
    """Each key of one parameter: the pieces of the ranks end to end; scalars as rank 0 has them."""
    if sum(numel for _, _, numel in where) != math.prod(shape):
        raise CheckpointError(f"the ranks' files hold {sum(n for *_, n in where)} elements of '{name}' {list(shape)}")
    for key, value in flats[0].items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            yield key, TensorRef.of(torch.as_tensor(value, dtype=torch.float32).clone())
            continue

        def read(key: str = key) -> torch.Tensor:
            parts = [flats[rank][key].detach().narrow(0, start, numel) for rank, start, numel in where]
            return torch.cat(parts).view(shape)

        yield key, TensorRef(shape=shape, dtype=value.dtype, read=read)


def _frozen_of_stage_3(models: Sequence[Mapping[str, Any]]) -> dict[str, TensorRef]:
    """What the optimizer does not step: parts of frozen parameters, and buffers, which every rank has whole."""
    first = models[0]
    found = {name: TensorRef.of(first["module"][name]) for name in first["buffer_names"] if name in first["module"]}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        size = tuple(shape)

        def read(parts: Sequence[torch.Tensor] = parts, size: tuple[int, ...] = size) -> torch.Tensor:
            return torch.cat(list(parts))[: math.prod(size)].view(size)

        found[name] = TensorRef(shape=size, dtype=parts[0].dtype, read=read)
    return found


def _groups(optimizer: Mapping[str, Any], names: list[list[str]], checkpoint: Path) -> list[ParameterGroup]:
    """ZeRO-3 cuts groups of more than `sub_group_size` elements per rank into several; `params` numbers them."""
    groups = []
    for group in _base_state(optimizer)["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(ParameterGroup(options=options, names=[n for part in group["params"] for n in names[part]]))
    if sum(len(group.names) for group in groups) != sum(map(len, names)):
        raise CheckpointError(f"{checkpoint}: DeepSpeed's files do not say which group each parameter belongs to")
    return groups
