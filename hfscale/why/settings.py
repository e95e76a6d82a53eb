"""Compares what decides the numbers of two runs: arguments, versions, device, model and layout."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hfscale.why.difference import Earlier
from hfscale.why.run_folder import RunFolder, read_run
from hfscale.why.tolerance import roundoff

_BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "split_batches",
    "train_batch_size",
)
_LAYOUT_ARGUMENTS = (
    *_BATCH,
    *(
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "deepspeed_plugin",
        "parallelism_config",
        "accelerator_config",
        "tp_size",
    ),
    *(
        "pp_size",
        "cp_size",
        "ep_size",
        "fsdp_size",
        "dp_shard_size",
        "dp_replicate_size",
        "distributed_state",
    ),
    *("pipeline_schedule", "virtual_stages", "ddp_backend", "ddp_timeout", "n_gpu", "local_rank"),
    *(
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_find_unused_parameters",
        "ddp_static_graph",
        "use_cpu",
    ),
    *(
        "world_size",
        "fsdp_min_num_params",
        "fsdp_transformer_layer_cls_to_wrap",
        "fsdp_plugin_args",
    ),
)
"""Arguments that say how the work is spread. They change nothing as long as the global batch is equal."""
_ABOUT_STEPS = {
    "optimizer": (
        *(
            "learning_rate",
            "lr_scheduler_type",
            "lr_scheduler_kwargs",
            "warmup_steps",
            "warmup_ratio",
            "weight_decay",
        ),
        *(
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "optim",
            "optim_args",
            "max_steps",
            "num_train_epochs",
        ),
        *(
            "optim_target_modules",
            "lr_scaling_rule",
            "base_global_batch_size",
            "warmup_scale",
            "base_block_size",
            "batch_schedule",
            "lr_clock",
        ),
    ),
    "clipping": ("max_grad_norm",),
    "data": (
        *(
            "data_seed",
            "seed",
            "train_file",
            "dataset_name",
            "dataset_config_name",
            "block_size",
            "packing",
        ),
        *(
            "group_by_length",
            "train_sampling_strategy",
            "dataloader_drop_last",
            "streaming",
            "max_length",
            "loss_on",
        ),
        *(
            "chat_template",
            "ignore_data_skip",
            "length_column_name",
            "completion_only_loss",
            "assistant_only_loss",
        ),
    ),
    "rng": ("seed", "full_determinism"),
    "weights": ("seed", "model_name_or_path", "config_name", "optim"),
    "forward": (
        *(
            "bf16",
            "fp16",
            "tf32",
            "torch_compile",
            "torch_compile_backend",
            "torch_compile_mode",
            "use_peft",
        ),
        *(
            "use_liger_kernel",
            "neftune_noise_alpha",
            "attn_implementation",
            "fused_loss",
            "label_smoothing_factor",
        ),
        *(
            "average_tokens_across_devices",
            "lora_r",
            "lora_alpha",
            "lora_dropout",
            "lora_target_modules",
            "seed",
        ),
        *("quantization", "dtype", "packing", "loss_type"),
    ),
    "gradient": ("average_tokens_across_devices", "gradient_compression", "bf16", "fp16"),
    "backward": ("gradient_checkpointing_kwargs", "average_tokens_across_devices"),
}
"""The kind of difference that each argument can explain. Arguments that are not listed explain none."""
_MODEL_EXPLAINS = ("weights", "forward")


def settings_differences(a: RunFolder, b: RunFolder) -> list[Earlier]:
    """Return what differs in the settings of two runs, the layout and what may change results first.

    Arguments that decide nothing, such as names of folders, are left out.

    Args:
        a (`RunFolder`): the first run.
        b (`RunFolder`): the second run.
    """
    found: list[Earlier] = []
    for kind in ("layout", "model", "versions", "numerics"):
        if a.part(kind) and b.part(kind):
            found += [
                Earlier(kind=kind, name=name, a=x, b=y)
                for name, x, y in _differing(a.part(kind), b.part(kind))
            ]
    if a.part("arguments") and b.part("arguments"):
        for name, x, y in _differing(a.part("arguments"), b.part("arguments")):
            if kinds_explained(name) and name not in _LAYOUT_ARGUMENTS:
                found.append(Earlier(kind="config", name=name, a=x, b=y))
    return sorted(
        found, key=lambda one: ("config", "model", "layout", "numerics", "versions").index(one.kind)
    )


def compare_settings(first: Path, second: Path) -> list[Earlier]:
    """Return what differs in the settings that two runs have recorded (`settings_differences`).

    Args:
        first (`Path`): the output directory of a run.
        second (`Path`): that of another one.

    Raises:
        UsageError: one of them is not the output directory of a run.
    """
    return settings_differences(read_run(first), read_run(second))


def kinds_explained(argument: str) -> tuple[str, ...]:
    """Return the kinds of first difference that an argument can cause.

    Args:
        argument (`str`): the name of a training argument or of a recipe's flag.
    """
    return tuple(kind for kind, names in _ABOUT_STEPS.items() if argument in names)


def cause_of(kinds: Collection[str], settings: Sequence[Earlier]) -> Earlier | None:
    """Return the setting that explains a first difference; None if no setting does.

    Args:
        kinds (`Collection[str]`): what it may be, of `hfscale.why.difference.KINDS`.
        settings (`Sequence[Earlier]`): what `settings_differences` returns.
    """
    for one in settings:
        if one.kind == "config" and not set(kinds).isdisjoint(kinds_explained(one.name)):
            return one
        of_model = one.kind == "model" and one.name.startswith(("config.", "class"))
        if of_model and not set(kinds).isdisjoint(_MODEL_EXPLAINS):
            return one
        of_batch = one.kind == "layout" and one.name == "global_batch_size"
        if of_batch and not set(kinds).isdisjoint(("data", "forward", "weights")):
            return one
    return None


def has_same_arithmetic(a: RunFolder, b: RunFolder) -> tuple[bool, str]:
    """Return whether two runs must agree bit by bit, and why or why not.

    Args:
        a (`RunFolder`): the first run.
        b (`RunFolder`): the second run.
    """
    if not a.setup or not b.setup:
        return False, "a run has not recorded its versions"
    if a.layouts != b.layouts or len(a.layouts) > 1:
        return False, f"the layouts are {_layout_text(a)} and {_layout_text(b)}"
    for part in ("layout", "versions", "numerics"):
        for name, x, y in _differing(a.part(part), b.part(part)):
            return False, f"{name} is {x} and {y}"
    for name in _BATCH:
        x, y = a.part("arguments").get(name), b.part("arguments").get(name)
        if x != y:
            return False, f"{name} is {x} and {y}"
    numerics = a.part("numerics")
    if numerics.get("device") != "cpu" and not numerics.get("deterministic"):
        return (
            False,
            "kernels of the GPU may add up in another order in each run (see --full_determinism)",
        )
    return True, "layout, versions and device are the same"


def lowest_dtype(run: RunFolder) -> str:
    """Return the format of the lowest precision in which a run computes.

    Args:
        run (`RunFolder`): a run; without a record of its setup, bfloat16.
    """
    if not run.setup:
        return "bfloat16"
    arguments = run.part("arguments")
    if arguments.get("bf16") or "bfloat16" in run.part("model").get("elements", {}):
        return "bfloat16"
    if arguments.get("fp16") or "float16" in run.part("model").get("elements", {}):
        return "float16"
    if run.part("numerics").get("tf32"):
        return "float16"  # TF32 has as many bits of significand
    return "float32"


def lowest_of_both(a: RunFolder, b: RunFolder) -> str:
    """Return the format of the lowest precision in which one of two runs computes.

    Args:
        a (`RunFolder`): the first run.
        b (`RunFolder`): the second run.
    """
    return max((lowest_dtype(run) for run in (a, b)), key=roundoff)


def most_ranks(a: RunFolder, b: RunFolder) -> int:
    """Return the largest number of processes of any launch of two runs.

    Args:
        a (`RunFolder`): the first run.
        b (`RunFolder`): the second run.
    """
    return max((ranks for _, ranks in (*a.layouts, *b.layouts)), default=1)


def _layout_text(run: RunFolder) -> str:
    return " then ".join(f"{strategy} on {ranks}" for strategy, ranks in run.layouts) or "unknown"


def _differing(
    a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Return (name, value, value) of what differs; names of nested values have dots."""
    for name in sorted({*a, *b}):
        x, y = a.get(name), b.get(name)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _differing(x, y, f"{prefix}{name}.")
        elif x != y:
            yield f"{prefix}{name}", x, y
