"""A folder for `from_pretrained`, from a checkpoint of any strategy, one tensor in memory at a time."""

import json
import re
import shutil
from pathlib import Path

import torch

from hfscale.checkpoint.formats import layout_of, read_view
from hfscale.checkpoint.formats.merged import split
from hfscale.checkpoint.formats.parameter_names import PARAMETERS_NAME, model_of_config, read_parameter_names
from hfscale.checkpoint.formats.safetensors_files import read_weights, write_weights
from hfscale.checkpoint.formats.view import TensorRef
from hfscale.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_SHARD_BYTES = 5 * 10**9
"""Of `save_pretrained` up to transformers 4: small enough for every file system and hub."""
# The tokenizer's, the processor's and the generation's files; not those of the training.
_MODEL_FILE = re.compile(r"[^.].*\.(json|txt|jinja|model|md)")
_OF_TRAINING = re.compile(r"trainer_state\.json|hfscale_.*\.json|.*\.index\.json|all_results\.json|.*_results\.json")


def export(
    checkpoint: Path,
    target: Path,
    *,
    strategy: str,
    model: Path | None = None,
    dtype: str = "auto",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[str]:
    """Write config, tokenizer and weights (an adapter, under PEFT) into the new folder `target`; names of the files.

    Args:
        strategy (`str`): under which the checkpoint was written.
        model (`Path`, *optional*): a folder with the config and the tokenizer; absent: the checkpoint's own, or those
            of the run's folder around it.
        dtype (`str`): `float32`, `bfloat16`, `float16`, or `auto`: what the config says, else as they are. DeepSpeed's
            checkpoints hold fp32 masters.
        max_shard_bytes (`int`): no file of weights is larger, unless one tensor alone is.

    Raises:
        CheckpointError: there is no config, or a file is broken.
    """
    weights, aliases = _weights(checkpoint, strategy)
    weights = {name: ref for name, ref in weights.items() if name not in aliases}
    is_adapter = any(name.startswith("base_model.model.") for name in weights)
    config_name = "adapter_config.json" if is_adapter else "config.json"
    home = _home_of(config_name, [model] if model else [checkpoint, checkpoint.parent])
    if home is None:
        raise CheckpointError(
            f"{model or checkpoint} has no {config_name}: name a folder that has it, and the tokenizer, by --model"
        )
    target.mkdir(parents=True)
    try:
        _copy_model_files(home, target)
        wanted = _dtype(target / config_name, dtype)
        if not is_adapter:
            weights = _as_published(weights, target)
        stem = "adapter_model" if is_adapter else "model"
        write_weights(target, stem, weights, max_shard_bytes=None if is_adapter else max_shard_bytes, dtype=wanted)
    except BaseException:
        shutil.rmtree(target)
        raise
    return sorted(path.name for path in target.iterdir())


def _weights(checkpoint: Path, strategy: str) -> tuple[dict[str, TensorRef], dict[str, str]]:
    if layout_of(strategy) == "whole":
        weights = read_weights(checkpoint, "model") or read_weights(checkpoint, "adapter_model")
        if weights is None:
            raise CheckpointError(f"{checkpoint} has neither model.safetensors nor adapter_model.safetensors")
        return weights, {}
    view = read_view(checkpoint, strategy)
    aliases = dict(view.aliases)
    if (checkpoint / PARAMETERS_NAME).is_file():
        aliases |= read_parameter_names(checkpoint).aliases
    return dict(view.weights), {alias: name for alias, name in aliases.items() if name in view.weights}


def _as_published(weights: dict[str, TensorRef], folder: Path) -> dict[str, TensorRef]:
    """Under the names that `save_pretrained` gives them, which other programs know too."""
    try:
        model = model_of_config(folder)
    except CheckpointError:
        return weights  # transformers cannot build it, and so has no other names for it either
    return split(weights, model)


def _home_of(name: str, folders: list[Path]) -> Path | None:
    return next((folder for folder in folders if (folder / name).is_file()), None)


def _copy_model_files(home: Path, target: Path) -> None:
    for path in sorted(home.iterdir()):
        is_plain = path.is_file() and not path.is_symlink()
        if is_plain and _MODEL_FILE.fullmatch(path.name) and not _OF_TRAINING.fullmatch(path.name):
            shutil.copyfile(path, target / path.name)


def _dtype(config: Path, asked: str) -> torch.dtype | None:
    """The dtype to write; the config then says the same."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    if asked == "auto":
        return DTYPES.get(str(fields.get("dtype", fields.get("torch_dtype"))))
    if config.name == "config.json":
        fields.pop("torch_dtype", None)
        config.write_text(json.dumps(fields | {"dtype": asked}, indent=2) + "\n", encoding="utf-8")
    return DTYPES[asked]
