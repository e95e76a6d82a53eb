"""Writes a folder for `from_pretrained` from a checkpoint of any strategy, with one tensor in memory at a time."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.formats import dcp, read_view, unsharded
from hfscale.checkpoint.formats.average import read_average_metadata, stored_groups
from hfscale.checkpoint.formats.merged import merge, split
from hfscale.checkpoint.formats.parallel import ADAPTER_PREFIX
from hfscale.checkpoint.formats.parameter_names import model_of_config, read_parameter_names
from hfscale.checkpoint.formats.safetensors_files import cast_ref, write_weights
from hfscale.checkpoint.formats.unsharded import read_unsharded_weights
from hfscale.checkpoint.formats.view import TensorRef, saved_names
from hfscale.checkpoint.manifest import read_manifest
from hfscale.core.run_files import MANIFEST_NAME, PARAMETERS_NAME
from hfscale.core.text_files import read_json
from hfscale.errors import CheckpointError
from hfscale.facts.strategies import facts_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_BYTES = 5 * 10**9
"""The default of `save_pretrained` up to transformers 4: small enough for every file system and for the Hub."""
# The files of the tokenizer, the processor and the generation config, and not those of the training.
_MODEL_FILE = re.compile(r"[^.].*\.(json|txt|jinja|model|md)")
_TRAINING_FILE = re.compile(
    r"trainer_state\.json|data_order_\d+\.json|hfscale_.*\.json|.*\.index\.json|all_results\.json|.*_results\.json"
)


def export(
    checkpoint: Path,
    target: Path,
    *,
    strategy: str,
    model: Path | None = None,
    dtype: str = "auto",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    average: bool = False,
) -> list[str]:
    """Write config, tokenizer and weights (under PEFT: those of the adapter) into the new folder `target`.

    Args:
        checkpoint (`Path`): a checkpoint.
        target (`Path`): the new folder.
        strategy (`str`): strategy under which the checkpoint was written.
        model (`Path`, *optional*): a folder with the config and the tokenizer; by default those of the checkpoint, or
            else those in its parent folder, the output directory of the run.
        dtype (`str`): `float32`, `bfloat16`, `float16`, or `auto`: the data type in the config if it has one, else the
            stored one. DeepSpeed's checkpoints contain fp32 master weights.
        max_shard_bytes (`int`): maximal bytes of weights per file, unless a single tensor is larger.
        average (`bool`): whether to write the average of the trained weights that the checkpoint keeps.

    Returns:
        `list[str]`: names of the files.

    Raises:
        CheckpointError: there is no config or no average, or a file is broken.
        FileExistsError: `target` exists.
    """
    weights = stored_weights(checkpoint, strategy)
    config_folder = find_config(weights, [model] if model else [checkpoint, checkpoint.parent])
    if average:
        weights = _with_average(weights, checkpoint, config_folder)
    return write_model_folder(
        published(weights, config_folder),
        target,
        config_folder=config_folder,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )


def stored_weights(checkpoint: Path, strategy: str) -> dict[str, TensorRef]:
    """Return the weights of a checkpoint, of tied ones one, by the names under which it stores them.

    Args:
        checkpoint (`Path`): a checkpoint.
        strategy (`str`): strategy under which the checkpoint was written.

    Raises:
        CheckpointError: a file is missing or broken.
    """
    weights, aliases = _weights(checkpoint, strategy)
    return {name: ref for name, ref in weights.items() if name not in aliases}


def find_config(weights: Mapping[str, TensorRef], folders: Sequence[Path]) -> Path:
    """Return the first folder that has the config of a model, or of an adapter if the weights are those of one.

    Args:
        weights (`Mapping[str, TensorRef]`): the weights of the model or of the adapter.
        folders (`Sequence[Path]`): the folders, the likeliest first.

    Raises:
        CheckpointError: none of them has one.
    """
    name = _config_name(weights)
    for folder in folders:
        if (folder / name).is_file():
            return folder
    raise CheckpointError(
        f"{folders[0]} has no {name}: give a folder that has it, and the tokenizer, with --model"
    )


def published(weights: dict[str, TensorRef], config_folder: Path) -> dict[str, TensorRef]:
    """Return the weights with the names that `save_pretrained` writes and other programs expect.

    Args:
        weights (`dict[str, TensorRef]`): the weights as a checkpoint stores them.
        config_folder (`Path`): a folder with the config of the model.
    """
    if _is_adapter(weights):
        return weights
    try:
        model = model_of_config(config_folder)
    except CheckpointError:
        # transformers cannot build the model, so it has no other names for its weights
        return weights
    return split(weights, model)


def write_model_folder(
    weights: dict[str, TensorRef],
    target: Path,
    *,
    config_folder: Path,
    dtype: str,
    max_shard_bytes: int,
) -> list[str]:
    """Write config, tokenizer and weights into a new folder.

    Args:
        weights (`dict[str, TensorRef]`): the weights by the names that `save_pretrained` writes.
        target (`Path`): the new folder.
        config_folder (`Path`): a folder with the config, and with the tokenizer if there is one.
        dtype (`str`): as for `export`.
        max_shard_bytes (`int`): likewise.

    Returns:
        `list[str]`: names of the files.

    Raises:
        CheckpointError: a file is broken.
        FileExistsError: `target` exists.
    """
    is_adapter = _is_adapter(weights)
    target.mkdir(parents=True)
    try:
        _copy_model_files(config_folder, target)
        torch_dtype = _dtype(target / _config_name(weights), dtype)
        stem = "adapter_model" if is_adapter else "model"
        limit = None if is_adapter else max_shard_bytes
        write_weights(target, stem, weights, max_shard_bytes=limit, dtype=torch_dtype)
    except BaseException:
        shutil.rmtree(target)
        raise
    return sorted(path.name for path in target.iterdir())


def _is_adapter(weights: Mapping[str, TensorRef]) -> bool:
    return any(name.startswith(ADAPTER_PREFIX) for name in weights)


def _config_name(weights: Mapping[str, TensorRef]) -> str:
    return "adapter_config.json" if _is_adapter(weights) else "config.json"


def _weights(checkpoint: Path, strategy: str) -> tuple[dict[str, TensorRef], dict[str, str]]:
    format_name = facts_of(strategy).file_format
    if format_name == unsharded.FORMAT.name:
        return read_unsharded_weights(checkpoint), {}
    manifest = read_manifest(checkpoint) if (checkpoint / MANIFEST_NAME).is_file() else None
    if manifest is not None and manifest.why_model_only() is not None:
        weights = _weights_alone(checkpoint, format_name)
        aliases = {}
    else:
        view = read_view(checkpoint, strategy)
        weights = dict(view.weights)
        aliases = dict(view.aliases)
    if (checkpoint / PARAMETERS_NAME).is_file():
        aliases |= read_parameter_names(checkpoint).aliases
    return weights, {alias: name for alias, name in aliases.items() if name in weights}


def _weights_alone(checkpoint: Path, format_name: str) -> dict[str, TensorRef]:
    """Return the weights of a checkpoint without optimizer: of `save_only_model`, or an older one of `state_limit`."""
    if format_name == dcp.FORMAT.name and (checkpoint / dcp.MODEL_FOLDER).is_dir():
        return dcp.read_fsdp2_weights(checkpoint)
    return read_unsharded_weights(checkpoint)


def read_average(checkpoint: Path) -> dict[str, TensorRef] | None:
    """Return the averaged weights of a checkpoint by the names of the parameters; None if there are none.

    Args:
        checkpoint (`Path`): the folder of the checkpoint.

    Raises:
        CheckpointError: the files are broken.
    """
    metadata = read_average_metadata(checkpoint)
    if metadata is None or not metadata.groups:
        return None
    stored = stored_groups(checkpoint, metadata)
    return {name: _mean([refs[name] for _, refs in stored]) for name in stored[0][1]}


def _mean(refs: list[TensorRef]) -> TensorRef:
    def read() -> torch.Tensor:
        total = refs[0].read()
        for ref in refs[1:]:
            total += ref.read()
        return total / len(refs)

    return TensorRef(shape=refs[0].shape, dtype=refs[0].dtype, read=read)


def _with_average(
    weights: dict[str, TensorRef], checkpoint: Path, config_folder: Path
) -> dict[str, TensorRef]:
    """Return the weights with the average of those that are trained, each in the data type of the weight.

    Raises:
        CheckpointError: the checkpoint keeps no average, or one of other weights.
    """
    average = read_average(checkpoint)
    if average is None:
        raise CheckpointError(
            f"{checkpoint} keeps no average of its weights: train with --ema_decay or WeightAveragingCallback, or "
            "average several checkpoints with hfscale checkpoints average"
        )
    aliases = {}
    if (checkpoint / PARAMETERS_NAME).is_file():
        names = read_parameter_names(checkpoint)
        aliases = {first: second for second, first in names.aliases.items()}
    places = {name: _place_of(name, weights, aliases) for name in average}
    if None in places.values() and not _is_adapter(weights):
        # Experts are stored one by one, and trained as one parameter
        weights = merge(weights, model_of_config(config_folder))
        places = {name: _place_of(name, weights, aliases) for name in average}
    averaged = dict(weights)
    for name, place in places.items():
        if place is None:
            raise CheckpointError(f"{checkpoint} keeps an average of '{name}' and no such weight")
        averaged[place] = cast_ref(average[name], weights[place].dtype)
    return averaged


def _place_of(
    name: str, weights: Mapping[str, TensorRef], aliases: Mapping[str, str]
) -> str | None:
    """Return the name under which the weights have a trained parameter; None if they do not have it."""
    names = (name, aliases.get(name, name), *saved_names(f"{ADAPTER_PREFIX}{name}"))
    return next((each for each in names if each in weights), None)


def _copy_model_files(folder: Path, target: Path) -> None:
    for path in sorted(folder.iterdir()):
        is_regular = path.is_file() and not path.is_symlink()
        if (
            is_regular
            and _MODEL_FILE.fullmatch(path.name)
            and not _TRAINING_FILE.fullmatch(path.name)
        ):
            shutil.copyfile(path, target / path.name)


def _model_config(path: Path) -> dict[str, Any]:
    try:
        fields = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a config: {error}; copy it again"
        ) from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is no config of a model: copy it again")
    return fields


def _dtype(config: Path, requested: str) -> torch.dtype | None:
    """Return the data type to write, and set it in the config if it was given explicitly."""
    fields = _model_config(config)
    if requested == "auto":
        return DTYPES.get(str(fields.get("dtype", fields.get("torch_dtype"))))
    if config.name == "config.json":
        fields.pop("torch_dtype", None)
        config.write_text(
            json.dumps(fields | {"dtype": requested}, indent=2) + "\n", encoding="utf-8"
        )
    return DTYPES[requested]
