"""Training arguments of a simulated world: the fields that checks read before there is a process group or a model."""

from types import SimpleNamespace
from typing import Any

DEFAULTS: dict[str, Any] = {
    "auto_find_batch_size": False,
    "average_tokens_across_devices": True,
    "bf16": True,
    "deepspeed": None,
    "fp16": False,
    "fsdp": None,
    "gradient_compression": "none",
    "include_num_input_tokens_seen": "no",
    "is_of_recipe": True,
    "liger_kernel_config": None,
    "lr_scheduler_type": "linear",
    "mixed_precision": "bf16",
    "neftune_noise_alpha": None,
    "optim": "adamw_torch",
    "parallelism_config": None,
    "records": None,
    "recompute": "full",
    "resume_from_checkpoint": "true",
    "save_only_model": False,
    "save_strategy": "steps",
    "task": None,
    "torch_compile": False,
    "use_cpu": False,
    "use_liger_kernel": False,
}
"""Those of a recipe without flags."""


def simulated_arguments(world_size: int = 8, *, ds: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    """Return the arguments of a recipe on so many processes.

    Args:
        world_size (`int`): the processes.
        ds (`dict`, *optional*): the config of DeepSpeed, if the launcher or a flag asks for it.
        changes: values of other fields.
    """
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config=ds or {}))
    return SimpleNamespace(world_size=world_size, deepspeed_plugin=plugin, **DEFAULTS | changes)
