"""DeepSpeed's formats: the partitions of each ZeRO rank (read), and the universal checkpoint (read and written).

*Partitions.* ZeRO-1 and 2 concatenate the parameters of a group and give each rank an equal part; each file says which
fragments of which parameters it has (`param_slice_mappings`). ZeRO-3 divides every parameter into equal parts, the
last one padded, and each rank concatenates its own parts. The files contain three small classes of DeepSpeed besides
tensors; `pickles.DEEPSPEED_CLASSES` replaces them, so DeepSpeed is not needed and none of its code runs.

*Universal checkpoint.* One file per parameter and optimizer state, for any ZeRO stage on any number of ranks:

    global_step4/zero/model.norm.weight/{fp32,exp_avg,exp_avg_sq,step}.pt
    global_step4/zero/optimizer_state.pt                        options of the parameter groups
    global_step4/{,zero_pp_rank_0_}mp_rank_00_model_states.pt   counters, for stages 1 and 2, and for stage 3
    latest_universal                                            name of the folder

DeepSpeed reads it if its config has `"checkpoint": {"load_universal": true}`. Each rank takes its part according to
its own engine, so nothing here depends on the number of ranks. `ds_to_universal`, DeepSpeed's own converter, reads
only ZeRO files, and unpickles them.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.formats.format import Format, Origin
from hfscale.checkpoint.formats.view import (
    CheckpointView,
    ParameterGroup,
    TensorRef,
    canonical_name,
    check_names,
    saved_name,
)
from hfscale.checkpoint.pickles import DEEPSPEED_CLASSES, FOLDER_NAME, load_archive
from hfscale.core.text_files import read_text
from hfscale.core.versions import installed
from hfscale.errors import CheckpointError
from hfscale.facts.strategies import WEIGHTS, StrategyFacts

UNIVERSAL_LATEST = "latest_universal"
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_FORMAT_VERSION = "0.19.8"  # DeepSpeed's version of this format, used if DeepSpeed is not installed
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_MOMENTS = ("exp_avg", "exp_avg_sq")
Fragment = tuple[int, int, int]
"""A part of a parameter: the rank, the first element in the rank's flat partition, and the number of elements."""


def tag_folder(checkpoint: Path, *, latest: str = "latest") -> Path:
    """Return the folder with DeepSpeed's files, whose name is in the file `latest`.

    Args:
        checkpoint (`Path`): the checkpoint.
        latest (`str`): name of that file: `latest`, or `latest_universal` for a universal checkpoint.

    Raises:
        CheckpointError: the file is missing or does not name a folder of the checkpoint.
    """
    path = checkpoint / latest
    try:
        tag = read_text(path, errors="replace").strip()
    except OSError:
        raise CheckpointError(
            f"{checkpoint} is not a complete DeepSpeed checkpoint: it has no file '{latest}'"
        ) from None
    if not FOLDER_NAME.fullmatch(tag) or not (checkpoint / tag).is_dir():
        raise CheckpointError(f"{path} names '{tag[:80]}', which is not a folder next to it")
    return checkpoint / tag


# ---- The partitions of each rank


def read_zero(checkpoint: Path) -> CheckpointView:
    """Return the view of a `zero1`, `zero2` or `zero3` checkpoint of any number of ranks.

    The fp32 master weights become the weights.

    Raises:
        CheckpointError: a file is missing or broken, or the checkpoint was written with model or pipeline parallelism.
    """
    folder = tag_folder(checkpoint)
    paths = _optimizer_files(folder)
    optimizers = [load_archive(path, DEEPSPEED_CLASSES)["optimizer_state_dict"] for path in paths]
    is_stage_3 = "fp32_flat_groups" in optimizers[0]
    name = (
        "zero_pp_rank_{}_mp_rank_00_model_states.pt" if is_stage_3 else "mp_rank_00_model_states.pt"
    )
    ranks = range(len(paths) if is_stage_3 else 1)
    models = [load_archive(folder / name.format(rank), DEEPSPEED_CLASSES) for rank in ranks]
    model = models[0]
    if model.get("mp_world_size", 1) != 1 or (folder / "mp_rank_01_model_states.pt").exists():
        raise CheckpointError(
            f"{checkpoint} was written with DeepSpeed's model parallelism, which hfscale cannot convert"
        )
    _check_order(checkpoint, paths[0], model)
    shapes = [dict(group) for group in model["param_shapes"]]
    if is_stage_3:
        frozen = _frozen_of_stage_3(models)
    else:
        frozen = {name: TensorRef.of(tensor) for name, tensor in model["module"].items()}
    aliases = {
        canonical_name(alias): canonical_name(first)
        for alias, first in model.get("shared_params", {}).items()
    }
    weights = {
        saved_name(canonical_name(name)): ref
        for name, ref in frozen.items()
        if canonical_name(name) not in aliases
    }
    state: dict[str, dict[str, TensorRef]] = {}
    names: list[list[str]] = []
    for number, tensors in enumerate(_tensors_by_group(optimizers, shapes, is_stage_3=is_stage_3)):
        names.append([])
        for name, keys in tensors.items():
            parameter = canonical_name(name)
            weights[saved_name(parameter)] = keys.pop("fp32")
            state[parameter] = keys
            names[number].append(parameter)
    check_names([*weights, *state])
    groups = _groups(optimizers[0], names, checkpoint)
    return CheckpointView(weights=weights, groups=groups, state=state, aliases=aliases)


def _check_order(checkpoint: Path, path: Path, model: Mapping[str, Any]) -> None:
    """Check that the files say where each parameter is.

    With `round_robin_gradients` stages 1 and 2 have the parameters in another order than DeepSpeed 0.19.8 notes in
    `param_slice_mappings`. Its BF16_Optimizer, whose files begin with `bf16_`, ignores the setting.
    """
    zero = model.get("ds_config", {}).get("zero_optimization", {})
    is_reordered = zero.get("round_robin_gradients") and zero.get("stage") in (1, 2)
    if is_reordered and not path.name.startswith("bf16_"):
        raise CheckpointError(
            f"{checkpoint} was written with round_robin_gradients, where DeepSpeed's files name parameters in the "
            "places of others: resume from it under the same strategy on as many ranks"
        )


def _optimizer_files(folder: Path) -> list[Path]:
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _OPTIMIZER_FILE.fullmatch(path.name))
    }
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"{folder} has the optimizer states of the ranks {sorted(found)}: some are missing"
        )
    return [path for _, path in sorted(found.items())]


def _base_state(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    if not isinstance(base, Mapping) or "state" not in base:
        raise CheckpointError(
            "these DeepSpeed files have its elastic format, which hfscale cannot convert"
        )
    return base


def _flat_tensors(optimizer: Mapping[str, Any], number: int, masters: str) -> dict[str, Any]:
    """Return everything that one rank has of group `number`: its flat partitions by key, and scalars."""
    base = _base_state(optimizer)
    found = {"fp32": optimizer[masters][number], **base["state"].get(number, {})}
    steps = [
        group["step"]
        for group in base["param_groups"]
        if number in group["params"] and "step" in group
    ]
    # DeepSpeed's own optimizers count steps per group
    return {"step": steps[0], **found} if steps else found


def _tensors_by_group(
    optimizers: Sequence[Mapping[str, Any]],
    shapes: Sequence[Mapping[str, torch.Size]],
    *,
    is_stage_3: bool,
) -> Iterator[dict[str, dict[str, TensorRef]]]:
    """Yield, for each group, the tensors of each parameter by key."""
    fragments_of = _fragments_of_stage_3 if is_stage_3 else _fragments_of_stages_1_and_2
    masters = "fp32_flat_groups" if is_stage_3 else "single_partition_of_fp32_groups"
    for number, group in enumerate(shapes):
        flats = [_flat_tensors(optimizer, number, masters) for optimizer in optimizers]
        fragments = fragments_of(optimizers, number, group)
        yield {
            name: dict(_joined(name, tuple(shape), flats, fragments[name]))
            for name, shape in group.items()
        }


def _fragments_of_stages_1_and_2(
    optimizers: Sequence[Mapping[str, Any]], number: int, group: Mapping[str, torch.Size]
) -> dict[str, list[Fragment]]:
    mappings = [optimizer["param_slice_mappings"][number] for optimizer in optimizers]
    return {
        name: [
            (rank, own[name].start, own[name].numel)
            for rank, own in enumerate(mappings)
            if name in own
        ]
        for name in group
    }


def _fragments_of_stage_3(
    optimizers: Sequence[Mapping[str, Any]], number: int, group: Mapping[str, torch.Size]
) -> dict[str, list[Fragment]]:
    ranks = len(optimizers)
    fragments = {}
    start = 0
    for name, shape in group.items():
        elements = math.prod(shape)
        share = math.ceil(elements / ranks)  # DeepSpeed pads the last rank's part to this length
        fragments[name] = [
            (rank, start, max(0, min(share, elements - rank * share))) for rank in range(ranks)
        ]
        start += share
    return fragments


def _joined(
    name: str,
    shape: tuple[int, ...],
    flats: Sequence[Mapping[str, Any]],
    fragments: Sequence[Fragment],
) -> Iterator[tuple[str, TensorRef]]:
    """Yield each key of one parameter with its tensor: the fragments of the ranks concatenated, or rank 0's scalar.

    Args:
        name (`str`): the parameter.
        shape (`tuple[int, ...]`): its full shape.
        flats: the flat partitions of each rank.
        fragments: its parts, in the parameter's order.
    """
    if sum(numel for _, _, numel in fragments) != math.prod(shape):
        stored = sum(numel for _, _, numel in fragments)
        raise CheckpointError(
            f"the ranks' files have {stored} elements of '{name}', whose shape is {list(shape)}"
        )
    for key, value in flats[0].items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            yield key, TensorRef.of(torch.as_tensor(value, dtype=torch.float32).clone())
            continue

        def read(key: str = key) -> torch.Tensor:
            parts = [
                flats[rank][key].detach().narrow(0, start, numel)
                for rank, start, numel in fragments
            ]
            return torch.cat(parts).view(shape)

        yield key, TensorRef(shape=shape, dtype=value.dtype, read=read)


def _frozen_of_stage_3(models: Sequence[Mapping[str, Any]]) -> dict[str, TensorRef]:
    """Return what the optimizer does not update: frozen parameters, which are sharded, and buffers, which are not."""
    first = models[0]
    found = {
        name: TensorRef.of(first["module"][name])
        for name in first["buffer_names"]
        if name in first["module"]
    }
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name].reshape(-1) for model in models]
        size = tuple(shape)

        def read(
            parts: Sequence[torch.Tensor] = parts, size: tuple[int, ...] = size
        ) -> torch.Tensor:
            return torch.cat(list(parts))[: math.prod(size)].view(size)

        found[name] = TensorRef(shape=size, dtype=parts[0].dtype, read=read)
    return found


def _groups(
    optimizer: Mapping[str, Any], names: list[list[str]], checkpoint: Path
) -> list[ParameterGroup]:
    """Return the optimizer's groups.

    ZeRO-3 divides groups of more than `sub_group_size` elements per rank into several; `params` has their numbers.
    """
    groups = []
    for group in _base_state(optimizer)["param_groups"]:
        groups.append(
            ParameterGroup.of(group, [name for part in group["params"] for name in names[part]])
        )
    if sum(len(group.names) for group in groups) != sum(map(len, names)):
        raise CheckpointError(
            f"{checkpoint}: DeepSpeed's files do not say which group each parameter belongs to: resume from it under "
            "ZeRO with DeepSpeed 0.19.8 or later, and convert the checkpoint that this run saves"
        )
    return groups


# ---- The universal checkpoint


def is_universal(checkpoint: Path) -> bool:
    """Return whether the DeepSpeed checkpoint is a universal one."""
    return (checkpoint / UNIVERSAL_LATEST).is_file()


def read_universal(checkpoint: Path) -> CheckpointView:
    """Return the view of a universal checkpoint that hfscale wrote.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    folder = tag_folder(checkpoint, latest=UNIVERSAL_LATEST)
    model = load_archive(folder / _MODEL_STATES[0])
    options = load_archive(folder / "zero" / "optimizer_state.pt")["param_groups"]
    groups: list[ParameterGroup] = []
    weights: dict[str, TensorRef] = {}
    state: dict[str, dict[str, TensorRef]] = {}
    for option, shapes in zip(options, model["param_shapes"], strict=True):
        check_names(shapes)
        groups.append(ParameterGroup.of(option, shapes))
        for name in shapes:
            keys = {
                path.stem: _read_tensor(path)
                for path in sorted((folder / "zero" / name).glob("*.pt"))
            }
            if "fp32" not in keys:
                raise CheckpointError(f"{folder} has no weight of '{name}'")
            weights[saved_name(name)] = keys.pop("fp32")
            state[name] = keys
    others = {name: TensorRef.of(tensor) for name, tensor in model["module"].items()}
    return CheckpointView(
        weights=others | weights, groups=groups, state=state, aliases=model["shared_params"]
    )


def _read_tensor(path: Path) -> TensorRef:
    stored = load_archive(path)
    return TensorRef.of(stored["param"] if isinstance(stored, Mapping) else torch.as_tensor(stored))


def write_universal(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write a universal checkpoint, which ZeRO-1, 2 and 3 read.

    Args:
        view (`CheckpointView`): what is written.
        folder (`Path`): folder of the new checkpoint.
        step (`int`): optimizer steps taken; DeepSpeed's counters and the name of its folder contain it.
        world_size (`int`): number of processes that will resume; DeepSpeed's counters contain it.

    Raises:
        CheckpointError: the name of a parameter is not plain (see `check_names`), a parameter has no weight, or a
            tensor of `view` cannot be read.
    """
    tagged = folder / f"global_step{step}"
    zero = tagged / "zero"
    zero.mkdir(parents=True)
    groups = [group for group in view.groups if group.names]  # DeepSpeed drops an empty group
    for group in groups:
        check_names(group.names)
        for name in group.names:
            _write_parameter(zero / name, view.weight_of(name), view.state.get(name, {}))
    trained = {saved_name(name) for group in groups for name in group.names}
    others = {
        name: ref.read()
        for name, ref in view.weights.items()
        if name not in trained | set(view.aliases)
    }
    _write_counters(tagged, view, groups, others, step=step, world_size=world_size)
    options = [dict(group.options) for group in groups]
    steps = [
        view.state[group.names[0]]["step"].read()
        for group in groups
        if "step" in view.state[group.names[0]]
    ]
    state = {
        "param_groups": options,
        "ds_version": installed("deepspeed") or _FORMAT_VERSION,
        # Stage 3 reads this entry and gives the options of the first group to all groups, so it has only the options
        # that all groups share.
        "optimizer_state_dict": {
            "state": {0: {"step": steps[0] if steps else None}},
            "param_groups": [_shared_options(options)],
        },
    }
    torch.save(state, zero / "optimizer_state.pt")
    (folder / UNIVERSAL_LATEST).write_text(tagged.name, encoding="utf-8")


def _write_parameter(folder: Path, weight: TensorRef, state: Mapping[str, TensorRef]) -> None:
    folder.mkdir()
    torch.save({"param": weight.read().float().contiguous()}, folder / "fp32.pt")
    for key, ref in state.items():
        tensor = ref.read().contiguous().clone()
        torch.save(tensor if ref.shape == () else {"param": tensor}, folder / f"{key}.pt")


def _write_counters(
    folder: Path,
    view: CheckpointView,
    groups: list[ParameterGroup],
    others: Mapping[str, torch.Tensor],
    *,
    step: int,
    world_size: int,
) -> None:
    counters: dict[str, Any] = {
        "module": dict(others),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            {name: torch.Size(view.weight_of(name).shape) for name in g.names} for g in groups
        ],
        "frozen_param_shapes": {},
        "shared_params": dict(view.aliases),
        "frozen_param_fragments": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": installed("deepspeed") or _FORMAT_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    for name in _MODEL_STATES:
        torch.save(counters, folder / name)


def _shared_options(options: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options that have the same value in all groups; the others stay as the launch sets them."""
    first = options[0]
    return {
        key: value
        for key, value in first.items()
        if all(group.get(key) == value for group in options)
    }


def _check(view: CheckpointView, facts: StrategyFacts) -> None:
    """Check that DeepSpeed's universal loader can load the view.

    Raises:
        CheckpointError: stage 3 will load it, and the optimizer is not of the Adam family, or its groups have
            different learning rates.
    """
    if WEIGHTS not in facts.shards:
        return
    for group in view.groups:
        for name in group.names:
            missing = [key for key in _MOMENTS if key not in view.state.get(name, {})]
            if missing:
                raise CheckpointError(
                    f"the optimizer has no {missing[0]} of '{name}': ZeRO-3 loads only the states of AdamW; convert "
                    "to zero2 or to fsdp2 instead"
                )
    rates = {group.options.get("lr") for group in view.groups if group.names}
    if len(rates) > 1:
        raise CheckpointError(
            f"the optimizer's groups have the learning rates {sorted(map(str, rates))}: ZeRO-3 loads one for all; "
            "convert to zero2 or to fsdp2 instead"
        )


def _wrote(checkpoint: Path) -> bool:
    return (checkpoint / "latest").is_file() or is_universal(checkpoint)


def _origin(checkpoint: Path, world_size: int) -> Origin:
    folder = tag_folder(checkpoint)
    files = [folder / name for name in _MODEL_STATES]
    path = files[0] if files[0].is_file() else files[1]
    config = load_archive(path)["ds_config"]
    return Origin(
        strategy=f"zero{config['zero_optimization']['stage']}",
        global_batch_size=config.get("train_batch_size"),
    )


def _read(checkpoint: Path) -> CheckpointView:
    return read_universal(checkpoint) if is_universal(checkpoint) else read_zero(checkpoint)


FORMAT = Format(
    name="zero",
    label="ZERO",
    wrote=_wrote,
    origin=_origin,
    read=_read,
    write=write_universal,
    check=_check,
    keeps_tensor_files=is_universal,
    drops_empty_groups=True,
)
