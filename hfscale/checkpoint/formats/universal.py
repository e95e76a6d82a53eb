"""DeepSpeed's universal checkpoint: one file per parameter and state, for any ZeRO stage on any number of ranks.

    global_step4/zero/model.norm.weight/{fp32,exp_avg,exp_avg_sq,step}.pt
    global_step4/zero/optimizer_state.pt                    the groups' options
    global_step4/{,zero_pp_rank_0_}mp_rank_00_model_states.pt   counters, for stages 1 and 2, and for 3
    latest_universal                                        the name of the folder

DeepSpeed reads it where its config says `"checkpoint": {"load_universal": true}`; each rank takes its part by the
layout that its own engine has, so nothing here depends on one. `ds_to_universal`, DeepSpeed's own way to it, starts
from ZeRO files only, and unpickles them.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.formats.archives import load_archive
from hfscale.checkpoint.formats.view import CheckpointView, ParameterGroup, TensorRef, check_names, saved_name
from hfscale.checkpoint.formats.zero import tag_folder
from hfscale.errors import CheckpointError

LATEST = "latest_universal"
_OLDEST = "0.19.8"  # DeepSpeed whose files these are, where none is installed
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_universal(checkpoint: Path) -> bool:
    """Whether the DeepSpeed checkpoint is a universal one."""
    return (checkpoint / LATEST).is_file()


def read_universal(checkpoint: Path) -> CheckpointView:
    """The view of a universal checkpoint that hfscale wrote.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    folder = tag_folder(checkpoint, latest=LATEST)
    model = load_archive(folder / _MODEL_STATES[0])
    options = load_archive(folder / "zero" / "optimizer_state.pt")["param_groups"]
    groups, weights, state = [], {}, {}
    for option, shapes in zip(options, model["param_shapes"], strict=True):
        check_names(shapes)
        groups.append(ParameterGroup(options={k: v for k, v in option.items() if k != "params"}, names=list(shapes)))
        for name in shapes:
            keys = {path.stem: _read(path) for path in sorted((folder / "zero" / name).glob("*.pt"))}
            if "fp32" not in keys:
                raise CheckpointError(f"{folder} has no weight of '{name}'")
            weights[saved_name(name)] = keys.pop("fp32")
            state[name] = keys
    others = {name: TensorRef.of(tensor) for name, tensor in model["module"].items()}
    return CheckpointView(weights=others | weights, groups=groups, state=state, aliases=model["shared_params"])


def _read(path: Path) -> TensorRef:
    stored = load_archive(path)
    return TensorRef.of(stored["param"] if isinstance(stored, Mapping) else torch.as_tensor(stored))


def write_universal(view: CheckpointView, folder: Path, *, step: int, world_size: int) -> None:
    """Write the universal checkpoint, for ZeRO-1, 2 and 3 alike.

    Raises:
        CheckpointError: states that DeepSpeed's loader does not take.
    """
    tagged = folder / f"global_step{step}"
    zero = tagged / "zero"
    zero.mkdir(parents=True)
    groups = [group for group in view.groups if group.names]  # DeepSpeed drops an empty one
    for group in groups:
        check_names(group.names)
        for name in group.names:
            _write_parameter(zero / name, view.weight_of(name), view.state.get(name, {}))
    stepped = {saved_name(name) for group in groups for name in group.names}
    others = {name: ref.read() for name, ref in view.weights.items() if name not in stepped | set(view.aliases)}
    _write_counters(tagged, view, groups, others, step=step, world_size=world_size)
    options = [dict(group.options) for group in groups]
    steps = [view.state[group.names[0]]["step"].read() for group in groups if "step" in view.state[group.names[0]]]
    state = {
        "param_groups": options,
        "ds_version": _deepspeed_version(),
        # Stage 3 reads these two, and gives the options of the first group to all: so it gets those they share.
        "optimizer_state_dict": {
            "state": {0: {"step": steps[0] if steps else None}},
            "param_groups": [_shared(options)],
        },
    }
    torch.save(state, zero / "optimizer_state.pt")
    (folder / LATEST).write_text(tagged.name, encoding="utf-8")


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
        "param_shapes": [{name: torch.Size(view.weight_of(name).shape) for name in g.names} for g in groups],
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
        "ds_version": _deepspeed_version(),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    for name in _MODEL_STATES:
        torch.save(counters, folder / name)


def check_for_stage_3(view: CheckpointView) -> None:
    """Make sure that ZeRO-3's universal loader can take the view.

    Raises:
        CheckpointError: another optimizer than Adam, or groups with learning rates of their own.
    """
    for group in view.groups:
        for name in group.names:
            missing = [key for key in _MOMENTS if key not in view.state.get(name, {})]
            if missing:
                raise CheckpointError(
                    f"the optimizer has no {missing[0]} of '{name}': ZeRO-3 loads the states of AdamW only; convert "
                    "to zero2, or to fsdp2"
                )
    rates = {group.options.get("lr") for group in view.groups if group.names}
    if len(rates) > 1:
        raise CheckpointError(
            f"the optimizer's groups have the learning rates {sorted(map(str, rates))}: ZeRO-3 loads one for all; "
            "convert to zero2, or to fsdp2"
        )


def _shared(options: list[dict[str, Any]]) -> dict[str, Any]:
    """The options in which all groups agree; the others stay as the launch has set them."""
    first = options[0]
    return {key: value for key, value in first.items() if all(group.get(key) == value for group in options)}


def _deepspeed_version() -> str:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return _OLDEST
