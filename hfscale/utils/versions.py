"""Hides the differences between the supported versions of other packages, and says which version a feature needs.

This is the only module with guards for versions. Each function names the first version that makes it unnecessary:
when the declared minimum has reached that version, replace the calls by what the function returns there. torch and
transformers are imported inside the functions, so that the command line can use `require` without them.

A build of a vendor or of a nightly, such as torch 2.13.0a0+git1234, counts as the release that it precedes.
"""

import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from hfscale.errors import MissingDependencyError

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

RECIPES_NEED = "5.15"
"""Minimum transformers of the recipes."""
PEFT_MINIMUM = "0.18"
"""Minimum PEFT of LoRA adapters."""
NATIVE_TP_NEEDS = "5.23"
"""Minimum transformers of its own tensor parallelism in the recipes."""
PARALLEL_TRAINER_NEEDS = "5.23"
"""Minimum transformers of `ParallelTrainer`: it uses its tensor-parallel plans and masks of packed sequences."""


# ---- What is installed, and what is needed


def installed(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed.

    Args:
        package (`str`): its name in the package index, such as `torch`.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_at_least(package: str, minimum: str) -> bool:
    """Return whether a package is installed in a minimum version; a pre-release counts as its release.

    Args:
        package (`str`): its name in the package index, such as `torch`.
        minimum (`str`): the version, such as `2.9`.
    """
    found = installed(package)
    return found is not None and Version(Version(found).base_version) >= Version(minimum)


def require(package: str, minimum: str, feature: str, *, extra: str | None = None) -> None:
    """Raise an error if a feature needs a package that is not installed, or a later version of it.

    Args:
        package (`str`): its name in the package index, such as `transformers`.
        minimum (`str`): the first version that works.
        feature (`str`): what needs it, the subject of the message, such as `ParallelTrainer`.
        extra (`str`, *optional*): the extra of hfscale that installs the package.

    Raises:
        MissingDependencyError: the package is not installed or too old. The message says what is installed, what is
            needed and the command that installs it.
    """
    if is_at_least(package, minimum):
        return
    found = installed(package)
    state = f"{package} {found} is installed" if found else f"{package} is not installed"
    wanted = f"hfscale[{extra}]" if extra and found is None else f"{package}>={minimum}"
    raise MissingDependencyError(
        f'{feature} needs {package} {minimum} or later, and {state}: pip install --upgrade "{wanted}"'
    )


# ---- transformers: arguments


def recomputes_activations(args: "TrainingArguments") -> bool:
    """Return whether the backward recomputes the forward of the layers.

    Args:
        args (`TrainingArguments`): the training arguments; `activation_checkpointing` exists from transformers 5.23.
    """
    return bool(getattr(args, "activation_checkpointing", False) or args.gradient_checkpointing)


def pass_activation_checkpointing(args: Any) -> None:
    """Give `activation_checkpointing` and its keywords the names that they have before transformers 5.23.

    Args:
        args (`RecipeTrainingArguments`): has the new names in every version; `TrainingArguments` may have only the
            old ones.
    """
    if not is_at_least("transformers", "5.23"):
        args.gradient_checkpointing = args.activation_checkpointing or args.gradient_checkpointing
        args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs or args.gradient_checkpointing_kwargs


def uses_jit_checkpoint(args: "TrainingArguments") -> bool:
    """Return whether transformers' own checkpoint on SIGTERM is on.

    Args:
        args (`TrainingArguments`): the training arguments; `enable_jit_checkpoint` exists from transformers 5.0.
    """
    return bool(getattr(args, "enable_jit_checkpoint", False))


def saves_safetensors(args: "TrainingArguments") -> bool:
    """Return whether weights are saved as safetensors files.

    Args:
        args (`TrainingArguments`): the training arguments; from transformers 5.0 there is no `save_safetensors`, and
            the result is always True.
    """
    return bool(getattr(args, "save_safetensors", True))


# ---- transformers: Trainer


def is_distributed_by_transformers(trainer: "Trainer") -> bool:
    """Return whether transformers itself, and not Accelerate, has distributed the model.

    Args:
        trainer (`Trainer`): `is_distributed_loading_by_transformers` exists from transformers 5.19.
    """
    return bool(getattr(trainer, "is_distributed_loading_by_transformers", False))


def context_parallel_size(trainer: "Trainer") -> int:
    """Return the number of ranks that share a sequence by ring attention.

    Args:
        trainer (`Trainer`): `get_cp_size` exists from transformers 5.0.
    """
    return int(trainer.get_cp_size()) if hasattr(trainer, "get_cp_size") else 1


def sequence_parallel_size(trainer: "Trainer") -> int:
    """Return the number of ranks that share a sequence by DeepSpeed's Ulysses.

    Args:
        trainer (`Trainer`): `get_sp_size` exists from transformers 5.0.
    """
    return int(trainer.get_sp_size()) if hasattr(trainer, "get_sp_size") else 1


def has_epoch_methods() -> bool:
    """Return whether Trainer has a method for an epoch and one for the end of a training: it does from 5.4.

    Before, it also has no batch size yet in `on_init_end`.
    """
    return is_at_least("transformers", "5.4")


# ---- transformers: models


def is_fsdp_enabled() -> bool:
    """Return whether the launcher has requested FSDP with weights loaded on rank 0 only.

    From transformers 5.15 the function is in `transformers.distributed.fsdp`.
    """
    if is_at_least("transformers", "5.15"):
        from transformers.distributed.fsdp import is_fsdp_enabled as asked
    else:
        from transformers.integrations.fsdp import is_fsdp_enabled as asked
    return bool(asked())


def merges_weights() -> bool:
    """Return whether transformers merges weights that its files contain separately: it does from 5.0."""
    return is_at_least("transformers", "5.0")


def weight_conversions(model: Any) -> list[Any]:
    """Return transformers' conversions from the weights in files to those in memory, without changes of a prefix.

    Args:
        model (`PreTrainedModel`): the model; `merges_weights` must be true. `PrefixChange` exists from transformers
            5.6.
    """
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    prefix_change = getattr(core_model_loading, "PrefixChange", ())
    table = get_model_conversion_mapping(model, add_legacy=False)
    return [entry for entry in table if not isinstance(entry, prefix_change)]


def convert_weight(converter: Any, name: str, model: Any) -> dict[str, Any]:
    """Return the weights that one of `weight_conversions` makes, by name.

    Args:
        converter (`WeightConverter`): the conversion, with its tensors added.
        name (`str`): the name of the weight in memory.
        model (`PreTrainedModel`): the model.
    """
    result: Any = converter.convert(name, model=model, config=model.config)
    weights: dict[str, Any] = result[0] if isinstance(result, tuple) else result  # before 5.1 a pair, with errors
    return weights


# ---- Optional packages


def is_peft_model(model: object) -> bool:
    """Return whether a model has adapters of PEFT, without importing PEFT where the model does not come from it.

    Args:
        model (`object`): the model of a Trainer.
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def is_lora_layer(module: object) -> bool:
    """Return whether a module is a LoRA layer of PEFT.

    Args:
        module (`object`): a module of a model.
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.lora.LoraLayer)
