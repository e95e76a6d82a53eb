"""The teacher of a distillation: its weights, their format, and whether the ranks share them.

TRL's `DistillationTrainer` places a teacher itself under DDP and DeepSpeed. Under FSDP2 it leaves the model that it is
given where it is: here each layer is a unit of FSDP2, so that a rank gathers one layer at a time, or each rank keeps
the model.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hfscale.checkpoint.load_once import weights_to_load
from hfscale.core.spelling import spelled
from hfscale.errors import UsageError
from hfscale.recipe.arguments import errors_name_flag
from hfscale.recipe.models import draw_model
from hfscale.trainer.strategies.requested import requested

if TYPE_CHECKING:
    from transformers import TrainingArguments

_OF_CONFIG = ("revision", "trust_remote_code")
"""Keywords of `from_pretrained` that its config takes too."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Values of `--teacher_dtype`: `auto` is that of the checkpoint."""


def load_teacher(
    name: str | None,
    student: nn.Module,
    training_args: "TrainingArguments",
    *,
    dtype: str,
    is_shared: bool,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    """Load the teacher, which is never trained, and place it as the strategy needs it.

    Args:
        name (`str`, *optional*): the checkpoint. None: a model as the student, whose weights are drawn from another
            seed, for a run that only shows that it works.
        student (`nn.Module`): the model that is trained.
        training_args (`TrainingArguments`): the device and the seed.
        dtype (`str`): one of `DTYPES`.
        is_shared (`bool`): whether each rank of FSDP2 keeps a part of the weights.
        options (`Mapping[str, Any]`): further keywords of `from_pretrained`.

    Raises:
        UsageError: the checkpoint cannot be loaded, or has another vocabulary than the student.
    """
    config: PreTrainedConfig = student.config  # type: ignore[assignment]
    if name is None:
        numbers = torch.float32 if dtype == "auto" else getattr(torch, dtype)
        teacher = draw_model(config, seed=training_args.seed + 1, dtype=numbers)
    else:
        with errors_name_flag("--teacher_model_name_or_path", name):
            of_config = {key: value for key, value in options.items() if key in _OF_CONFIG}
            _check_vocabulary(name, AutoConfig.from_pretrained(name, **of_config), config)
            weights = weights_to_load(training_args, name, revision=options.get("revision"))
            teacher = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype, **options)
    teacher.requires_grad_(False)
    teacher.eval()
    if not requested(training_args).by_fsdp:
        return teacher
    if is_shared and dist.get_world_size() > 1:
        _share(teacher, training_args.device)
        return teacher
    teacher.to(training_args.device)  # type: ignore[arg-type]  # of transformers' wrapper
    return teacher


def _check_vocabulary(name: str, teacher: PreTrainedConfig, student: PreTrainedConfig) -> None:
    """Check, before weights are loaded, that both models predict the same tokens."""
    known = teacher.get_text_config().vocab_size
    wanted = student.get_text_config().vocab_size
    if known != wanted:
        given = spelled("teacher_model_name_or_path", name)
        raise UsageError(
            f"{given} predicts {known} tokens, and the model that is trained {wanted}: the loss compares both, token "
            "by token; give a teacher with the same tokenizer and vocabulary"
        )


def _share(teacher: PreTrainedModel, device: torch.device) -> None:
    """Give each rank a part of each weight; a rank gathers one layer at a time in a forward pass."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in _layers(teacher):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # The rest, too, is freed after the forward pass: TRL gathers the head's weight again for its loss
    fully_shard(teacher, mesh=mesh, reshard_after_forward=True)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a model: the members of its outermost lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)
