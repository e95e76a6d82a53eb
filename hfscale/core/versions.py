"""Hides the differences between the supported versions of other packages, and says which version a feature needs.

This is the only module with guards for versions. Each function names the first version that makes it unnecessary:
when the declared minimum has reached that version, replace the calls by what the function returns there. torch and
transformers are imported inside the functions, so that the command line can use `require` without them.

A build of a vendor or of a nightly, such as torch 2.13.0a0+git1234, counts as the release that it precedes.
"""

import functools
import importlib.metadata
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from packaging.version import Version

from hfscale.errors import MissingDependencyError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import Trainer, TrainingArguments
    from typing_extensions import TypeIs


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A package that a feature needs."""

    package: str
    """Its name in the package index."""
    minimum: str
    """The first version that works."""
    extra: str | None = None
    """The extra of hfscale that installs it; None: hfscale itself does, or none."""


_BASE = (
    Requirement(package="torch", minimum="2.6"),
    Requirement(package="transformers", minimum="4.57"),
    Requirement(package="accelerate", minimum="1.10"),
)
_RECIPES = (
    *_BASE,
    Requirement(package="transformers", minimum="5.15"),
    Requirement(package="datasets", minimum="4.0", extra="recipes"),
)
_NEWEST = Requirement(package="transformers", minimum="5.23")
_DEEPSPEED = Requirement(package="deepspeed", minimum="0.19.8", extra="deepspeed")
_PEFT = Requirement(package="peft", minimum="0.18", extra="recipes")
_TRL = Requirement(package="trl", minimum="0.29.1", extra="trl")
_TRL_OF_RECIPES = Requirement(package="trl", minimum="1.16", extra="trl")
FEATURES = {
    "ScalingCallback": _BASE,
    # Before 1.13 Accelerate does not restore the optimizer's state under FSDP2, and nothing reports it.
    "FSDP2 checkpoints": (*_BASE, Requirement(package="accelerate", minimum="1.13")),
    "recipes": _RECIPES,
    "tensor parallelism of transformers": (*_BASE, _NEWEST),
    "transformers' own sharding": (*_BASE, Requirement(package="transformers", minimum="5.19")),
    # 5.21 and 5.22 divide some gradients of experts twice (`divides_expert_gradients_twice`); before 5.23 no replicas.
    "expert parallelism and replicas of transformers": (*_BASE, _NEWEST),
    # It uses the tensor-parallel plans and the masks of packed sequences of transformers 5.23.
    "ParallelTrainer": (*_RECIPES, _NEWEST, Requirement(package="torch", minimum="2.13")),
    "DeepSpeed": (*_BASE, _DEEPSPEED),
    "sequence parallelism of DeepSpeed": (
        *_RECIPES,
        _DEEPSPEED,
        Requirement(package="accelerate", minimum="1.12"),
    ),
    "LoRA": (*_BASE, _PEFT),
    "adapters of experts that ranks share": (
        *_BASE,
        _NEWEST,
        Requirement(package="peft", minimum="0.21"),
    ),
    "QLoRA": (*_BASE, _PEFT, Requirement(package="bitsandbytes", minimum="0.46")),
    "W&B": (*_BASE, Requirement(package="wandb", minimum="0.31", extra="wandb")),
    "TRL": (*_BASE, _TRL),
    "TRL recipes": (*_RECIPES, _TRL_OF_RECIPES),
    "vision recipes": (
        *_RECIPES,
        _NEWEST,
        _TRL_OF_RECIPES,
        Requirement(package="pillow", minimum="10.0", extra="vision"),
    ),
    "GPU telemetry": (*_BASE, Requirement(package="nvidia-ml-py", minimum="12", extra="gpu")),
    "Liger kernels": (*_BASE, Requirement(package="liger-kernel", minimum="0.6", extra="gpu")),
    "hfscale plan --plot": (Requirement(package="matplotlib", minimum="3.9", extra="report"),),
    "s3:// remote checkpoints": (*_BASE, Requirement(package="s3fs", minimum="2025.3", extra="s3")),
    "gs:// remote checkpoints": (
        *_BASE,
        Requirement(package="gcsfs", minimum="2025.3", extra="gcs"),
    ),
    # The tests run with these; earlier ones do not report each operation of a batch that failed.
    "hf:// remote checkpoints": (
        *_BASE,
        Requirement(package="huggingface-hub", minimum="2.4"),
        Requirement(package="hf-xet", minimum="1.8"),
    ),
}
"""What each feature needs; `hfscale doctor` prints it, and `require` checks it where the feature begins."""


# ---- What is installed, and what is needed


# Reading a package's metadata takes one or two milliseconds, and each training asks for several
@functools.cache
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


def what_is_missing(feature: str) -> str | None:
    """Return what a feature lacks here, or None if all that it needs is installed.

    Args:
        feature (`str`): one of `FEATURES`.

    Returns:
        `str` or `None`: one line with what is needed, what is installed and the command that installs it.
    """
    # The later of two entries for a package is stricter
    needs = {need.package: need for need in FEATURES[feature]}
    unmet = [need for need in needs.values() if not is_at_least(need.package, need.minimum)]
    if not unmet:
        return None
    states = []
    wanted = []
    for need in unmet:
        found = installed(need.package)
        states.append(
            f"{need.package} {need.minimum} or later ({f'{found} is' if found else 'not'} installed)"
        )
        # hfscale[extra] would need hfscale in a package index
        wanted.append(f'"{need.package}>={need.minimum}"')
    command = f"pip install --upgrade {' '.join(wanted)}"
    return f"{feature} cannot be used without {' and '.join(states)}: {command}"


def require(feature: str, flag: str | None = None) -> None:
    """Raise an error if a feature needs a package that is not installed, or a later version of it.

    Args:
        feature (`str`): one of `FEATURES`.
        flag (`str`, *optional*): the flag that asks for it, for the message.

    Raises:
        MissingDependencyError: a package is not installed or too old. The message says what is installed, what is
            needed and the command that installs it.
    """
    missing = what_is_missing(feature)
    if missing is not None:
        raise MissingDependencyError(f"{flag}: {missing}" if flag else missing)


# ---- torch: settings


def allows_tf32() -> bool:
    """Return whether fp32 matrix products use TF32 on this process's GPU: torch allows it, and the GPU has it.

    `fp32_precision` exists from torch 2.9. There it has the result of every way to ask for TF32, while reading
    `allow_tf32` raises a RuntimeError where the new way was used.
    """
    import torch
    from transformers.utils import is_torch_tf32_available

    if not is_torch_tf32_available():
        return False
    matmul: Any = torch.backends.cuda.matmul
    return bool(
        matmul.fp32_precision == "tf32" if is_at_least("torch", "2.9") else matmul.allow_tf32
    )


def keeps_receive_buffers() -> bool:
    """Return whether stages of a pipeline keep what they receive into from the first step on, for each micro-batch.

    torch 2.15 allocates it when a receive begins (pull request 196463).
    """
    return not is_at_least("torch", "2.15")


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
        args.gradient_checkpointing_kwargs = (
            args.activation_checkpointing_kwargs or args.gradient_checkpointing_kwargs
        )


def enable_recomputation(model: Any) -> None:
    """Have a model recompute the forward of its layers in the backward, without reentrant autograd.

    Args:
        model (`torch.nn.Module`): a model of transformers has `activation_checkpointing_enable` from 5.23, where the
            older name is deprecated; models of other libraries, such as sentence-transformers, have the older name.
    """
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def saves_safetensors(args: "TrainingArguments") -> bool:
    """Return whether weights are saved as safetensors files.

    Args:
        args (`TrainingArguments`): the training arguments; from transformers 5.0 there is no `save_safetensors`, and
            the result is always True.
    """
    return bool(getattr(args, "save_safetensors", True))


# ---- transformers: Trainer


def group_store(group: Any) -> Any:
    """Return the key-value store over which a process group was created; None before torch 2.8, which hides it.

    Args:
        group (`ProcessGroup`): `get_group_store` exists from torch 2.8.
    """
    return group.get_group_store() if hasattr(group, "get_group_store") else None


def distributed_sizes(model: object) -> dict[str, int] | None:
    """Return the sizes with which transformers has distributed a model while it loaded it; None if it has not.

    Args:
        model (`object`): a model of transformers has `is_distributed_loading_by_transformers` from 5.19, any other
            model may lack it; `dp_replicate_size` exists from 5.23.

    Returns:
        `dict[str, int]` or `None`: the sizes by axis: `dp_replicate`, `fsdp`, `tp`, `ep`, `pp`.
    """
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return None
    config = model.config.distributed_config  # type: ignore[attr-defined]
    return {
        axis: getattr(config, f"{axis}_size", None) or 1
        for axis in ("dp_replicate", "fsdp", "tp", "ep", "pp")
    }


def sizes_of_layers(config: Any, name: str) -> tuple[int, ...]:
    """Return the values that a size of a config has in its layers, the smallest first.

    Since 5.20 transformers raises an error for a size that differs between layers, such as the key-value heads of
    Gemma 4, and has it in the config of each layer.

    Args:
        config (`PreTrainedConfig`): the config of a text model.
        name (`str`): the size.

    Returns:
        `tuple[int, ...]`: its values; empty where the config has no such size, or it is no integer.
    """
    try:
        size = getattr(config, name, None)
    except RuntimeError:
        found = {getattr(layer, name) for layer in config.per_layer_config}
        return tuple(sorted(found))
    if type(size) is not int:
        return ()
    return (size,)


def divides_expert_gradients_twice(device_type: str) -> bool:
    """Return whether transformers divides the gradients of experts twice where no two ranks hold the same ones.

    There FSDP2 divides by the factor that transformers has set, and once more if sums are forced too. transformers
    forces them on every device in 5.21 and 5.22, in 5.19 and 5.20 where NCCL is not used, and from 5.23 only where
    several ranks hold the same experts.

    Args:
        device_type (`str`): the device of the ranks, such as `cuda`.
    """
    if is_at_least("transformers", "5.23"):
        return False
    return is_at_least("transformers", "5.21" if device_type == "cuda" else "5.19")


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


def hub_client() -> Any:
    """Return the object whose `upload_folder` Trainer calls to upload to the hub.

    It is a client that transformers shares; where there is none yet, the module of Trainer has the function.
    """
    from transformers import trainer

    return trainer.hf_api() if hasattr(trainer, "hf_api") else trainer


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


def finds_final_norm(model: Any) -> bool:
    """Return whether Accelerate's FSDP2 shards the head of a model together with its final norm.

    Versions without the function that looks for the norm leave the head with the rest of the model, whatever it is.

    Args:
        model (`nn.Module`): the model as it is given to `Accelerator.prepare`.
    """
    from accelerate.utils import fsdp_utils

    find = getattr(fsdp_utils, "_find_final_norm", None)
    return find is None or find(model) is not None


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
    # Before 5.1 a pair, with errors
    weights: dict[str, Any] = result[0] if isinstance(result, tuple) else result
    return weights


# ---- Accelerate


def why_fsdp2_cannot_tie() -> str | None:
    """Return why FSDP2 cannot train a model whose input and output embeddings are one weight; None if it can.

    Accelerate 1.14 puts the two into different groups, which torch refuses from 2.13 on.
    """
    if is_at_least("accelerate", "1.15") or not (
        is_at_least("accelerate", "1.14") and is_at_least("torch", "2.13")
    ):
        return None
    return (
        f"FSDP2 cannot train a model with tied embeddings with accelerate {installed('accelerate')} and torch "
        f'{installed("torch")}: pip install --upgrade "accelerate>=1.15"'
    )


def why_full_files_lose_adapters() -> str | None:
    """Return why a checkpoint of FSDP2 in one file (FULL_STATE_DICT) lacks most of the adapters; None if it has them.

    Before 1.15 Accelerate writes the shards of the first rank, and a resume leaves the others as they begin
    (accelerate pull request 4206).
    """
    if is_at_least("accelerate", "1.15"):
        return None
    return (
        f"accelerate {installed('accelerate')} saves the adapters of the first rank alone under FSDP2 with "
        "FULL_STATE_DICT, so that a resume would lose the others: set fsdp_state_dict_type to SHARDED_STATE_DICT, or "
        'pip install --upgrade "accelerate>=1.15"'
    )


# ---- Optional packages


def is_peft_model(model: object) -> "TypeIs[PeftModel]":
    """Return whether a model has adapters of PEFT, without importing PEFT where the model does not come from it.

    Args:
        model (`object`): the model of a Trainer.
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def is_lora_layer(module: object) -> "TypeGuard[Any]":
    """Return whether a module is a LoRA layer of PEFT.

    Args:
        module (`object`): a module of a model.
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.lora.LoraLayer)


def is_tuner_layer(module: object) -> "TypeGuard[Any]":
    """Return whether a module is a layer that PEFT puts around one of the model's, with parameters of its own.

    Args:
        module (`object`): a module of a model.
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)


def is_auxiliary_wrapper(module: object) -> "TypeGuard[Any]":
    """Return whether a module is PEFT's wrapper of one that trains next to the adapters: a copy of it
    (`modules_to_save`), or some of its rows (`trainable_token_indices`).

    Args:
        module (`object`): a module of a model.
    """
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.utils.AuxiliaryTrainingWrapper)
