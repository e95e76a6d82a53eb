"""Writes a folder for `from_pretrained` from a checkpoint of any strategy, with one tensor in memory at a time."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from hfscale.checkpoint.formats import read_view, unsharded
from hfscale.checkpoint.formats.merged import split
from hfscale.checkpoint.formats.parameter_names import model_of_config, read_parameter_names
from hfscale.checkpoint.formats.safetensors_files import write_weights
from hfscale.checkpoint.formats.unsharded import read_unsharded_weights
from hfscale.checkpoint.formats.view import TensorRef
from hfscale.core.run_files import PARAMETERS_NAME
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

    Returns:
        `list[str]`: names of the files.

    Raises:
        CheckpointError: there is no config, or a file is broken.
        FileExistsError: `target` exists.
    """
    weights, aliases = _weights(checkpoint, strategy)
    weights = {name: ref for name, ref in weights.items() if name not in aliases}
    is_adapter = any(name.startswith("base_model.model.") for name in weights)
    config_name = "adapter_config.json" if is_adapter else "config.json"
    folders = [model] if model else [checkpoint, checkpoint.parent]
    config_folder = next((folder for folder in folders if (folder / config_name).is_file()), None)
    if config_folder is None:
        raise CheckpointError(
            f"{model or checkpoint} has no {config_name}: give a folder that has it, and the tokenizer, with --model"
        )
    target.mkdir(parents=True)
    try:
        _copy_model_files(config_folder, target)
        torch_dtype = _dtype(target / config_name, dtype)
        if not is_adapter:
            weights = _with_published_names(weights, target)
        stem = "adapter_model" if is_adapter else "model"
        limit = None if is_adapter else max_shard_bytes
        write_weights(target, stem, weights, max_shard_bytes=limit, dtype=torch_dtype)
    except BaseException:
        shutil.rmtree(target)
        raise
    return sorted(path.name for path in target.iterdir())


def _weights(checkpoint: Path, strategy: str) -> tuple[dict[str, TensorRef], dict[str, str]]:
    if facts_of(strategy).file_format == unsharded.FORMAT.name:
        return read_unsharded_weights(checkpoint), {}
    view = read_view(checkpoint, strategy)
    aliases = dict(view.aliases)
    if (checkpoint / PARAMETERS_NAME).is_file():
        aliases |= read_parameter_names(checkpoint).aliases
    return dict(view.weights), {
        alias: name for alias, name in aliases.items() if name in view.weights
    }


def _with_published_names(weights: dict[str, TensorRef], folder: Path) -> dict[str, TensorRef]:
    """Return the weights with the names that `save_pretrained` writes and other programs expect."""
    try:
        model = model_of_config(folder)
    except CheckpointError:
        # transformers cannot build the model, so it has no other names for its weights
        return weights
    return split(weights, model)


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
