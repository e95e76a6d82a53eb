"""Describes what decides the numbers of a training: arguments, versions, device, model and layout.

Two runs that differ in none of it compute the same; `hfscale why` compares it first.
"""

import json
import platform
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import hfscale
from hfscale.core.redaction import MASK, is_secret_name, redact
from hfscale.core.versions import allows_tf32
from hfscale.trainer.state import global_batch_size, model_of
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "liger_kernel",
    "flash_attn",
    "triton",
)
"""Packages whose version is recorded where they are loaded. Looking for others on the disk would take 50 ms."""
_MAX_TEXT = 200
"""Longest text of a value; longer ones are cut."""
_MAX_TIED = 16
"""Groups of tied parameters that are listed."""
_LEFT_OUT_OF_CONFIG = (
    "id2label",
    "label2id",
    "transformers_version",
    "_name_or_path",
    "task_specific_params",
)


def run_setup(trainer: "Trainer") -> dict[str, Any]:
    """Return what decides the numbers of a training, in values that JSON has. Secrets are redacted.

    Args:
        trainer (`Trainer`): prepared for training.

    Returns:
        `dict[str, Any]`: `arguments` (those of the Trainer, by name), `versions` (by package), `numerics` (device,
            determinism, precision of matrix products), `model` (class, config, elements by dtype, tied parameters)
            and `layout` (strategy, processes, sizes of the axes, global batch in sequences).
    """
    strategy = Strategy.of(trainer)
    setup = {
        "arguments": _arguments(trainer),
        "versions": _versions(),
        "numerics": _numerics(trainer),
        "model": _model(model_of(trainer)),
        "layout": {
            "strategy": strategy.name,
            "world_size": trainer.args.world_size,
            "global_batch_size": global_batch_size(trainer),
            **strategy.axes(),
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(setup, default=str))
    return plain


def _arguments(trainer: "Trainer") -> dict[str, Any]:
    """Return the arguments of the Trainer, and those that a recipe or a subclass has set on them."""
    args = trainer.args
    values = {
        name: value for name, value in vars(args).items() if not name.startswith("_")
    } | args.to_dict()
    return {name: _plain(name, value) for name, value in sorted(values.items())}


def _plain(name: str, value: Any) -> Any:
    """Return a value as JSON has it, without secrets and of bounded length."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_secret_name(name):
        return MASK
    if isinstance(value, Mapping):
        return {str(key): _plain(str(key), inner) for key, inner in list(value.items())[:100]}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value[:100]]
    text = str(getattr(value, "value", value))
    text = text.split(" object at 0x")[0]  # addresses differ between equal runs
    return redact(text)[:_MAX_TEXT]


def _versions() -> dict[str, str]:
    found = {
        package: getattr(sys.modules.get(package), "__version__", None) for package in _PACKAGES
    }
    own = {
        "python": platform.python_version(),
        "hfscale": hfscale.__version__,
        "cuda": torch.version.cuda,
    }
    return {
        package: str(version) for package, version in (own | found).items() if version is not None
    }


def _numerics(trainer: "Trainer") -> dict[str, Any]:
    on_gpu = trainer.args.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if on_gpu else trainer.args.device.type,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": on_gpu and allows_tf32(),
    }


def _model(model: "nn.Module") -> dict[str, Any]:
    config = getattr(model, "config", None)
    values = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    elements: dict[str, int] = {}
    for parameter in model.parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        elements[kind] = elements.get(kind, 0) + parameter.numel()
    return {
        "class": type(model).__name__.removeprefix("FSDP"),
        "config": {
            key: _plain(key, value)
            for key, value in values.items()
            if key not in _LEFT_OUT_OF_CONFIG
        },
        "elements": elements,
        "trained": sum(parameter.requires_grad for parameter in model.parameters()),
        "tied": tied_parameters(model)[:_MAX_TIED],
    }


def tied_parameters(model: "nn.Module") -> list[list[str]]:
    """Return the names of parameters that are one tensor, by tensor.

    Args:
        model (`nn.Module`): a model.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)
