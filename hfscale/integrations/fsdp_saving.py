"""The FSDP2 part of a checkpoint: copied to the host, then written by torch's distributed checkpointing.

The layout is the one accelerate reads: `pytorch_model_fsdp_0/` and `optimizer_0/`, one file per rank in each.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from peft import PeftModel, get_peft_model_state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from transformers import Trainer

from hfscale.checkpoint.snapshot import tensor_bytes


def is_sharded_fsdp2(trainer: Trainer) -> bool:
    """Whether this is FSDP2 with checkpoints of one part per rank."""
    plugin = trainer.accelerator.state.fsdp_plugin
    return plugin.fsdp_version == 2 and plugin.state_dict_type.name == "SHARDED_STATE_DICT"


class FsdpSnapshot:
    """Copies this rank's shards to host memory, into the same buffers each time.

    torch's `DefaultStager` keeps them: it knows DTensors, and with a stager made anew the copy takes four times as
    long. Then its `save` writes, as inside its `async_save`, but on our thread: so model and optimizer follow each
    other on one process group, and the manifest follows both.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        on_accelerator = trainer.args.device.type != "cpu"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_accelerator,
                use_shared_memory=False,  # no other process reads it
                use_async_staging=False,  # when `take` returns, the next step may change the parameters
                use_non_blocking_copy=on_accelerator,
            )
        )

    def bytes(self) -> int:
        """Host memory in bytes that a snapshot takes on this rank."""
        return tensor_bytes(self._live())

    def take(self) -> Callable[[Path, dist.ProcessGroup | None], None]:
        """Copy; returns what writes the copy, given a folder and a process group. Every rank must call both."""
        copied = self._stager.stage(self._live())

        def write(folder: Path, group: dist.ProcessGroup | None) -> None:
            for key, name in (("model", FSDP_MODEL_NAME), ("optimizer", OPTIMIZER_NAME)):
                part = folder / f"{name}_0"
                part.mkdir(exist_ok=True)
                dcp.save({key: copied[key]}, storage_writer=dcp.FileSystemWriter(part), process_group=group)

        return write

    def _live(self) -> dict[str, Any]:
        """As accelerate's `save_fsdp_model` and `save_fsdp_optimizer` collect it, adapters alone for PEFT."""
        model, options = self._trainer.model, StateDictOptions()
        if isinstance(model, PeftModel):
            weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        else:
            weights = get_model_state_dict(model, options=options)
        optimizer: torch.optim.Optimizer = self._trainer.optimizer
        return {"model": weights, "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
