"""What Trainer itself writes on one process and under DDP: the main process has all of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, TRAINING_ARGS_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from hfscale.checkpoint.captures.capture import Capture, LiveState
from hfscale.checkpoint.contents import (
    processing_files,
    schedule_state,
    take_parameter_names,
    write_files,
)
from hfscale.checkpoint.overrides import model_methods
from hfscale.core.versions import is_peft_model


class UnshardedCapture(Capture):
    """Copies what Trainer's own methods write: weights, optimizer and schedule."""

    is_on_each_rank = False

    def __init__(self, trainer: Trainer, own_methods: Sequence[str] = ()) -> None:
        super().__init__(trainer, own_methods)
        self._model = ModelState(trainer)
        self._processing_files: dict[str, bytes] = {}

    def why_synchronous(self) -> str | None:
        return why_adapters_are_computed(self._trainer)

    def prepare(self) -> None:
        self._processing_files = processing_files(self._trainer)

    def live(self) -> LiveState:
        trainer = self._trainer
        if not trainer.args.should_save:
            return LiveState()
        # A subclass with methods of its own has written the model already
        weights = None if model_methods(self._own_methods) else self._model.live()
        pickles: dict[str, Any] = {}
        if not trainer.args.save_only_model:
            assert trainer.optimizer is not None  # Trainer makes it before the first step
            pickles[OPTIMIZER_NAME] = trainer.optimizer.state_dict()
        return LiveState(weights=weights, pickles=pickles | schedule_state(trainer))

    def write_weights(self, folder: Path, weights: dict[str, Any]) -> None:
        write_model(self._trainer, folder, weights, self._processing_files)

    def additions(self) -> Callable[[Path], None] | None:
        return take_parameter_names(self._trainer) if self._trainer.args.should_save else None


def why_adapters_are_computed(trainer: Trainer) -> str | None:
    """Return that PEFT computes the adapters of the model when it writes them, as a clause; None if it does not.

    Args:
        trainer (`Trainer`): its model may have adapters.
    """
    if not is_peft_model(trainer.model):
        return None
    model: Any = trainer.model
    kinds = {str(config.peft_type.value) for config in model.peft_config.values()}
    others = kinds - {"LORA"}
    return f"adapters of type {min(others)} are made when they are written" if others else None


class ModelState:
    """Collects the weights from which `save_pretrained` will choose.

    Args:
        trainer (`Trainer`): the Trainer whose model is saved.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._names_of_adapters: dict[tuple[str, ...], set[str]] = {}

    def live(self) -> dict[str, Any]:
        """Return the live tensors by name, not copied; with adapters, without those of the base model.

        PEFT decides what belongs to the adapters: their frozen parameters do, and embeddings that it saves with them.
        """
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        state_dict: dict[str, Any] = model.state_dict()
        if not is_peft_model(model):
            return state_dict
        adapters = tuple(model.peft_config)
        # PEFT may ask the hub for the config of the base model
        if adapters not in self._names_of_adapters:
            self._names_of_adapters[adapters] = _names_of_adapters(model, state_dict)
        kept = self._names_of_adapters[adapters]
        return {name: tensor for name, tensor in state_dict.items() if name in kept}


def _names_of_adapters(model: Any, state_dict: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that `PeftModel.save_pretrained` writes, for all adapters.

    PEFT renames the tensors, so they are recognised by identity. Of an adapter whose tensors it computes when it is
    saved, it may read any weight.
    """
    from peft import get_peft_model_state_dict

    written: set[int] = set()
    for adapter in model.peft_config:
        tensors = get_peft_model_state_dict(
            model, state_dict=dict(state_dict), adapter_name=adapter
        )
        written |= {id(tensor) for tensor in tensors.values()}
    if not written <= {id(tensor) for tensor in state_dict.values()}:
        return set(state_dict)
    return {name for name, tensor in state_dict.items() if id(tensor) in written}


def write_model(
    trainer: Trainer, folder: Path, state_dict: dict[str, Any], processing: Mapping[str, bytes]
) -> None:
    """Write copied weights as `Trainer._save` does.

    Args:
        trainer (`Trainer`): its model decides about the format.
        folder (`Path`): the folder of the checkpoint.
        state_dict (`dict[str, Any]`): a copy of what `ModelState.live` returned.
        processing (`dict[str, bytes]`): what `processing_files` returned.
    """
    unwrapped = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if isinstance(trainer.model, PreTrainedModel) or is_peft_model(trainer.model):
        trainer.model.save_pretrained(str(folder), state_dict=state_dict)
    elif isinstance(unwrapped, PreTrainedModel) or is_peft_model(unwrapped):
        unwrapped.save_pretrained(str(folder), state_dict=state_dict)
    else:
        safetensors.torch.save_file(
            state_dict, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"}
        )
    write_files(folder, processing)
    torch.save(trainer.args, folder / TRAINING_ARGS_NAME)
