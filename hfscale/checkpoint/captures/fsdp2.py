"""What Accelerate writes under FSDP2: this rank's shards of the model and of the optimizer.

The layout is the one that Accelerate reads, `pytorch_model_fsdp_0/` and `optimizer_0/` with one file per rank in each.
Accelerate's functions are not used: they exchange on the thread that calls them, while here model and optimizer follow
each other on one channel, and the manifest follows both.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import Trainer

from hfscale.checkpoint.captures.capture import Capture, LiveState
from hfscale.checkpoint.captures.unsharded import why_adapters_are_computed
from hfscale.checkpoint.contents import schedule_state, take_parameter_names
from hfscale.core.versions import is_peft_model
from hfscale.trainer.strategies.tensors import stored_tensor


class Fsdp2Capture(Capture):
    """Copies this rank's FSDP2 shards; on the main process also the schedule."""

    def why_synchronous(self) -> str | None:
        if not _is_sharded_fsdp2(self._trainer):
            return "the weights are gathered from all ranks to be written"
        if self._trainer.args.save_only_model:
            return "save_only_model under FSDP leaves no state to write"
        return why_adapters_are_computed(self._trainer)

    def live(self) -> LiveState:
        shards = {
            f"{FSDP_MODEL_NAME}_0": {"model": self._weights()},
            f"{OPTIMIZER_NAME}_0": {"optimizer": self._optimizer_states()},
        }
        is_main = self._trainer.args.should_save
        return LiveState(shards=shards, pickles=schedule_state(self._trainer) if is_main else {})

    def _weights(self) -> dict[str, Any]:
        """Collect the model as Accelerate's `save_fsdp_model` does; with PEFT only the adapters."""
        model: Any = self._trainer.model
        if is_peft_model(model):
            from peft import get_peft_model_state_dict

            adapters: dict[str, Any] = get_peft_model_state_dict(
                model, adapter_name=model.active_adapter
            )
            return adapters
        return get_model_state_dict(model, options=StateDictOptions())

    def _optimizer_states(self) -> dict[str, Any]:
        """Collect the optimizer as Accelerate's `save_fsdp_optimizer` does."""
        model: Any = self._trainer.model
        optimizer = self._trainer.optimizer
        assert optimizer is not None  # there is one in a training
        states: dict[str, Any] = dict(
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions())
        )
        # A state that is made like its weight may be wrapped as an FP8 weight is
        for values in states["state"].values():
            for key, value in values.items():
                values[key] = stored_tensor(value) if isinstance(value, torch.Tensor) else value
        return states

    def additions(self) -> Callable[[Path], None] | None:
        """Take the names of the parameters, and the config and tokenizer that `from_pretrained` needs."""
        if not self._trainer.args.should_save:
            return None
        write_names = take_parameter_names(self._trainer)

        def write(folder: Path) -> None:
            write_names(folder)
            _write_model_files(self._trainer, folder)

        return write


def _is_sharded_fsdp2(trainer: Trainer) -> bool:
    """Return whether this is FSDP2 with checkpoints of one part per rank (`SHARDED_STATE_DICT`)."""
    plugin = trainer.accelerator.state.fsdp_plugin
    return bool(plugin.fsdp_version == 2 and plugin.state_dict_type.name == "SHARDED_STATE_DICT")


def _write_model_files(trainer: Trainer, folder: Path) -> None:
    """Write the config of the model, or of its adapters, and the tokenizer, which Trainer leaves out under FSDP."""
    model: Any = trainer.model
    if is_peft_model(model):
        model.peft_config[model.active_adapter].save_pretrained(str(folder))
    elif hasattr(model, "config"):
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
