"""What Accelerate's FSDP2 needs of a model with buffers: that they can be loaded on rank 0 alone."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hfscale.trainer.state import model_of

if TYPE_CHECKING:
    from transformers import Trainer


def load_buffers_under_fsdp2(trainer: "Trainer") -> None:
    """Have Accelerate's FSDP2 load a model with persistent buffers. Call it before `trainer.train()`.

    Accelerate (1.15, `fsdp2_load_full_state_dict`) sends each entry of the state dict as a sharded parameter, and
    fails at a buffer, such as the bias by which DeepSeek-V3 and GLM-4.5 balance their experts. Buffers that are not
    persistent are left out. Within `Accelerator.prepare` no buffer is persistent; after it they are again, with the
    values of rank 0. Under other strategies nothing is done.

    Args:
        trainer (`Trainer`): `prepare` of its Accelerator is replaced.
    """
    if not trainer.is_fsdp_enabled:
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2 or not plugin.cpu_ram_efficient_loading:
        return
    prepare = trainer.accelerator.prepare

    @functools.wraps(prepare)
    def prepare_with_buffers(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(argument, nn.Module) for argument in args):
            return prepare(*args, **kwargs)
        with _persistent_buffers_left_out(model_of(trainer)):
            return prepare(*args, **kwargs)

    trainer.accelerator.prepare = prepare_with_buffers


@contextmanager
def _persistent_buffers_left_out(model: nn.Module) -> Iterator[None]:
    """Let all buffers of a model be non-persistent for a while; afterwards all ranks have those of rank 0."""
    saved = model.state_dict(keep_vars=True)
    owners = [
        (module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if (f"{path}.{name}" if path else name) in saved
    ]
    del saved
    for module, name in owners:
        module.register_buffer(name, module.get_buffer(name), persistent=False)
    try:
        yield
    finally:
        for module, name in owners:
            module.register_buffer(name, module.get_buffer(name), persistent=True)
    for module, name in owners:
        with torch.no_grad():
            dist.broadcast(module.get_buffer(name), src=0)
