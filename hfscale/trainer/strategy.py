"""Compares the strategy that runs with the one that was requested, and raises one clear error if they differ.

transformers and Accelerate silently turn several requests into something else: FSDP and DeepSpeed into DDP on a CPU,
two processes into one, or into two unrelated trainings that write one directory.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from accelerate.utils import DistributedType, is_compiled_module
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hfscale.core.versions import (
    is_peft_model,
    sequence_parallel_size,
    why_fsdp2_cannot_tie,
)
from hfscale.errors import MissingDependencyError, StrategyMismatchError
from hfscale.facts.support import Combination, check_support
from hfscale.trainer.native import native_layout
from hfscale.trainer.parallel_trainer import is_parallel_trainer
from hfscale.trainer.state import model_of

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

_TRUE = ("1", "true", "yes", "on", "y", "t")


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in _TRUE


def requested_family(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> str:
    """Return the family of strategies that the launcher and the arguments request.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Returns:
        `str`: `zero`, `fsdp`, `parallel` (with tensor parallelism), `ddp` or `single`. A script that loads its model
            with `distributed_config` requests `native`, which neither the launcher nor the arguments know.
    """
    if args.deepspeed or _is_set(environ, "ACCELERATE_USE_DEEPSPEED"):
        return "zero"
    if args.fsdp or _is_set(environ, "ACCELERATE_USE_FSDP"):
        return "fsdp"
    if int(environ.get("PARALLELISM_CONFIG_TP_SIZE", "1")) > 1:
        return "parallel"
    return "ddp" if int(environ.get("WORLD_SIZE", "1")) > 1 else "single"


def requested_strategy(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> str:
    """Return the strategy that the launcher and the arguments request, by its name in a checkpoint's manifest.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Returns:
        `str`: one of the names that `running_strategy` returns.
    """
    family = requested_family(args, environ)
    if family == "zero":
        # Accelerate or transformers makes it from the request
        assert args.deepspeed_plugin is not None
        return f"zero{args.deepspeed_plugin.zero_stage}"
    return f"fsdp{environ.get('FSDP_VERSION', '2')}" if family == "fsdp" else family


def compiles_full_model(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch.compile compiles the full model, and not each of its layers.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, from which Accelerate reads it.
    """
    return bool(args.torch_compile) and not _is_set(
        environ, "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"
    )


def gradient_compression(args: "TrainingArguments") -> str:
    """Return how DDP's gradients are compressed, a value of `--gradient_compression` of the recipes.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.

    Returns:
        `str`: `none` where the arguments have no such flag.
    """
    method: str = vars(args).get("gradient_compression", "none")
    return method


def averages_gradients(args: "TrainingArguments") -> bool:
    """Return whether all ranks have the same gradients when the optimizer steps.

    Args:
        args (`TrainingArguments`): the training arguments of a launch under DDP.

    Returns:
        `bool`: False for 1-bit Adam and LAMB, which average momenta in the optimizer after their warm-up.
    """
    return not gradient_compression(args).startswith("onebit")


def running_strategy(trainer: "Trainer") -> str:
    """Return the strategy that is set up, by its name in a checkpoint's manifest.

    Args:
        trainer (`Trainer`): a Trainer or a subclass of it.

    Returns:
        `str`: `single`, `ddp`, `fsdp1`, `fsdp2`, `zero0` … `zero3` if Accelerate set it up; `parallel` for
        `ParallelTrainer`; `native` if transformers distributed the model while it loaded it (`distributed_config`).
    """
    state = trainer.accelerator.state
    if is_parallel_trainer(trainer):
        return "parallel"
    if native_layout(trainer.model) is not None:
        return "native"
    if state.distributed_type == DistributedType.DEEPSPEED:
        return f"zero{state.deepspeed_plugin.zero_stage}"
    if state.distributed_type == DistributedType.FSDP:
        return f"fsdp{state.fsdp_plugin.fsdp_version}"
    return "ddp" if trainer.args.world_size > 1 else "single"


def let_fsdp_run_on_cpu() -> None:
    """Have Accelerate set up FSDP2 and device meshes on CPUs, over gloo. Call it before the Trainer is made.

    Accelerate supports them on GPUs only: on CPUs it silently runs DDP instead of FSDP, and refuses meshes.
    """
    state = PartialState()  # the one of the process
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU


def check_launch(args: "TrainingArguments", environ: Mapping[str, str] = os.environ) -> None:
    """Compare the number of processes with the number that the launcher started. It needs no model.

    Args:
        args (`TrainingArguments`): the training arguments of this launch.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Raises:
        StrategyMismatchError: the launcher started another number of processes than this run has, one process would
            train on several GPUs, or the launcher requests Megatron-LM, which transformers' Trainer does not support.
    """
    if _is_set(environ, "ACCELERATE_USE_MEGATRON_LM"):
        # Accelerate would give the Trainer a model it cannot step
        check_support(Combination(strategy="megatron_lm"))
    launched = int(environ.get("WORLD_SIZE", "1"))
    if launched != args.world_size:
        raise StrategyMismatchError(
            f"the launcher started {launched} processes but each of them trains alone (world size {args.world_size}): "
            "on a machine without GPUs pass --use_cpu true, or TrainingArguments(use_cpu=True)"
        )
    # accelerate's launcher of single processes exports MASTER_ADDR when its config asks for several, then starts one.
    by_single_launcher = "ACCELERATE_USE_CPU" in environ and "ACCELERATE_MIXED_PRECISION" in environ
    if by_single_launcher and "MASTER_ADDR" in environ and "WORLD_SIZE" not in environ:
        raise StrategyMismatchError(
            "the accelerate config asks for several CPU processes but its launcher started one: "
            "use distributed_type MULTI_GPU with use_cpu false, which starts them on a CPU machine too"
        )
    # More than 1 only in a single process whose model is on one GPU: Trainer sets 1 for a `device_map` over several.
    if args.n_gpu > 1:
        raise StrategyMismatchError(
            f"{args.n_gpu} GPUs are visible and 1 process was started, which Trainer would turn into nn.DataParallel "
            f"with {args.n_gpu} times the batch: start a process per GPU (accelerate launch --num_processes "
            f"{args.n_gpu}), or set CUDA_VISIBLE_DEVICES=0 to train on one"
        )


def check_distributed_model(trainer: "Trainer", environ: Mapping[str, str] = os.environ) -> None:
    """Check that nothing else is asked to distribute a model that transformers has distributed. It needs no training.

    Args:
        trainer (`Trainer`): it need not be prepared for training.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Raises:
        StrategyMismatchError: the launcher or the arguments request FSDP or DeepSpeed too.
    """
    asked = requested_family(trainer.args, environ)
    if native_layout(trainer.model) is not None and asked in ("fsdp", "zero"):
        raise StrategyMismatchError(
            f"{asked.upper()} was asked for but NATIVE would run: the model was loaded with distributed_config; "
            "launch with torchrun, or load it without"
        )


def check_strategy(trainer: "Trainer", environ: Mapping[str, str] = os.environ) -> str:
    """Compare the strategy and the wrapper of the prepared model with the request.

    Args:
        trainer (`Trainer`): prepared for training.
        environ (`Mapping[str, str]`): the environment variables, in which the launcher has left its config.

    Returns:
        `str`: the running strategy.

    Raises:
        StrategyMismatchError: another strategy was set up, or the model is not wrapped for it.
        UsageError: the strategy does not support the adapters of the model.
        MissingDependencyError: the installed versions cannot train this model with the strategy.
    """
    check_distributed_model(trainer, environ)
    asked, runs = requested_family(trainer.args, environ), running_strategy(trainer)
    if runs in ("parallel", "native") and asked in ("single", "ddp", "parallel"):
        asked = runs  # requested by the script, which the launcher does not know
    if not runs.startswith(asked):
        fix = {
            "zero": "unset ACCELERATE_USE_CPU, and on a machine without GPUs pass --use_cpu true",
            "fsdp": "accelerate runs FSDP on accelerators only; on a machine without GPUs use DDP or ZeRO",
        }.get(asked, "check the --config_file given to accelerate launch")
        raise StrategyMismatchError(
            f"{asked.upper()} was asked for but {runs.upper()} would run: {fix}"
        )
    model = unwrap_compiled(model_of(trainer))
    layout = native_layout(model)
    asked_for = Combination(
        engine="trainer" if layout is not None else None,
        strategy=runs,
        tp=layout.tp if layout is not None else None,
        method="lora" if is_peft_model(model) else "full",
        compile_full=compiles_full_model(trainer.args, environ),
        pp=layout.pp if layout is not None else None,
        expert_parallel=layout.ep if layout is not None else None,
        quantized=bool(getattr(model, "is_quantized", False)),
    )
    check_support(asked_for)
    problem = why_fsdp2_cannot_tie() if runs == "fsdp2" and _ties_embeddings(model) else None
    if problem is not None:
        raise MissingDependencyError(problem)
    wrapper = _strategy_wrapper(trainer)
    if not _wraps(runs, wrapper) and not is_parallel_trainer(trainer):
        raise StrategyMismatchError(
            f"{runs.upper()} was asked for but the model is a bare {type(wrapper).__name__}: "
            "let the Trainer wrap the model itself"
        )
    return runs


def check_adapters(trainer: "Trainer") -> None:
    """Check that the checkpoints of the running strategy can hold the adapters of the model, if it has some.

    Args:
        trainer (`Trainer`): prepared for training.

    Raises:
        UsageError: they cannot be saved, or a resumed run would not have all of them.
    """
    model = unwrap_compiled(model_of(trainer))
    if not is_peft_model(model):
        return
    config: Any = model.peft_config[model.active_adapter]
    check_support(
        Combination(
            strategy=running_strategy(trainer),
            adapter=str(config.peft_type.value).lower(),
            frozen_adapter=_has_frozen_matrices(model),
        )
    )


def _has_frozen_matrices(model: Any) -> bool:
    """Return whether a LoRA matrix of an adapter in use does not train, as the A matrices of LoRA-FA."""
    in_use = {f".{name}." for name in model.active_adapters}
    return any(
        "lora_" in name
        and not parameter.requires_grad
        and any(adapter in f"{name}." for adapter in in_use)
        for name, parameter in model.named_parameters()
    )


def _ties_embeddings(model: Any) -> bool:
    base = model.get_base_model() if is_peft_model(model) else model
    if not isinstance(base, PreTrainedModel) or base.get_output_embeddings() is None:
        return False
    return bool(base.config.get_text_config().tie_word_embeddings)


def describe_strategy(trainer: "Trainer") -> str:
    """Describe how the prepared model is distributed: wrapper, placements, this rank's share, offload.

    For example `FSDPLlamaForCausalLM, Replicate() Shard(dim=0) over dp_replicate=2 x dp_shard_cp=2, 50.0% of the
    parameters per rank`.

    Args:
        trainer (`Trainer`): prepared for training.
    """
    module = _strategy_wrapper(trainer)
    parts = [type(module).__name__]
    layout = native_layout(trainer.model)
    if layout is not None:
        parts.append(str(layout))
    if is_parallel_trainer(trainer):
        sizes = ((axis, size) for axis, size in vars(trainer.layout).items() if size > 1)
        parts = [
            " x ".join(f"{axis}={size}" for axis, size in sizes) or "one rank",
            trainer.stage_plan.schedule,
        ]
        if trainer.parallelized.sequence_parts > 1:
            parts.append(f"sequences cut over {trainer.parallelized.sequence_parts} ranks")
    first = next((p for p in module.parameters() if isinstance(p, DTensor)), None)
    if first is not None:
        mesh = first.device_mesh
        axes = zip(mesh.mesh_dim_names or ("dp_shard",), mesh.shape, strict=True)
        placements = " ".join(map(str, first.placements))
        parts.append(f"{placements} over {' x '.join(f'{name}={size}' for name, size in axes)}")
        if (
            trainer.is_fsdp_enabled
            and not trainer.accelerator.state.fsdp_plugin.reshard_after_forward
        ):
            parts[-1] += ", kept from forward to backward"
    share = _parameter_share(
        module, trainer.parameter_counts[0] if is_parallel_trainer(trainer) else None
    )
    parts.append(f"{share:.1%} of the parameters per rank")
    optimizer_share = _optimizer_share(module)
    if optimizer_share is not None:
        parts.append(f"{optimizer_share:.1%} of the optimizer")
    return ", ".join([*parts, *_deepspeed_traits(trainer), *_fsdp_traits(trainer)])


def _parameter_share(module: nn.Module, all_elements: int | None = None) -> float:
    """Return the elements that this rank keeps between steps over all elements, with the padding of the last shard.

    Args:
        module (`nn.Module`): the prepared model.
        all_elements (`int`, *optional*): the number of all elements, if `module` has only some of them.
    """
    kept = total = 0
    for parameter in module.parameters():
        total += getattr(parameter, "ds_numel", parameter.numel())
        if isinstance(parameter, DTensor):
            kept += parameter.to_local().numel()
        elif hasattr(parameter, "ds_tensor"):  # ZeRO-3
            kept += parameter.ds_tensor.numel()
        else:
            kept += parameter.numel()
    return kept / (all_elements or total)


def _optimizer_share(module: nn.Module) -> float | None:
    """Return the share of the parameters that ZeRO-1 and 2 update on this rank.

    It is None under the other strategies, where it equals `_parameter_share`.
    """
    optimizer = getattr(module, "optimizer", None)
    # ZeRO-1 in bf16 with gradients that are accumulated in fp32 has an optimizer of its own, `BF16_Optimizer`.
    names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
    partitions = next(
        (getattr(optimizer, name) for name in names if hasattr(optimizer, name)), None
    )
    if partitions is None:
        return None
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    kept: int = sum(partition.numel() for partition in partitions)
    return kept / trained


def _deepspeed_traits(trainer: "Trainer") -> list[str]:
    if not trainer.is_deepspeed_enabled:
        return []
    zero = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config.get(
        "zero_optimization", {}
    )
    devices = {
        part: zero.get(f"offload_{part}", {}).get("device", "none")
        for part in ("optimizer", "param")
    }
    traits = [
        f"{part} offloaded to {device}" for part, device in devices.items() if device != "none"
    ]
    partition_size = getattr(trainer.model_wrapped.optimizer, "zero_hpz_partition_size", 1)
    if partition_size > 1:
        traits.append(f"copies over {partition_size} ranks")
    if sequence_parallel_size(trainer) > 1:
        traits.append(f"sequences cut over {trainer.model_wrapped.sequence_parallel_size} ranks")
    return traits


def _fsdp_traits(trainer: "Trainer") -> list[str]:
    if trainer.is_fsdp_enabled and isinstance(
        trainer.accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy
    ):
        return ["offloaded to cpu"]
    return []


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or `module` itself if it is not compiled.

    Args:
        module (`nn.Module`): a module that a Trainer trains; the engine of DeepSpeed is one too.
    """
    # The wrapper has no other child
    return next(module.children()) if is_compiled_module(module) else module


def _strategy_wrapper(trainer: "Trainer") -> nn.Module:
    """Return the module with which the strategy has wrapped the model.

    Accelerate compiles what DDP has wrapped; under FSDP2 it compiles first, and shards the compiled model.
    """
    prepared: nn.Module = trainer.model_wrapped
    return prepared if isinstance(prepared, FSDPModule) else unwrap_compiled(prepared)


def _wraps(strategy: str, module: object) -> bool:
    if strategy == "single":
        return True
    if strategy == "ddp":
        return isinstance(module, DistributedDataParallel)
    if strategy == "fsdp2":
        return isinstance(module, FSDPModule)
    if strategy in ("parallel", "native"):
        return isinstance(module, nn.Module) and any(
            isinstance(p, DTensor) for p in module.parameters()
        )
    if strategy.startswith("zero"):
        # DeepSpeedEngine, without importing deepspeed
        return type(module).__name__.endswith("Engine")
    return True
