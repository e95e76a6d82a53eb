"""What a checkpoint of Trainer's is made of, in parts that can be taken now and written later.

Each function follows the method of Trainer that it names; a test compares the files byte for byte.
"""

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from peft import PeftModel
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.utils import SAFE_WEIGHTS_NAME


def write_model(trainer: Trainer, folder: Path, state_dict: dict[str, Any], processing: dict[str, bytes]) -> None:
    """As `Trainer._save` does, of copied weights; `processing` is what `processing_files` gave."""
    unwrapped = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if isinstance(trainer.model, PreTrainedModel | PeftModel):
        trainer.model.save_pretrained(folder, state_dict=state_dict)
    elif isinstance(unwrapped, PreTrainedModel | PeftModel):
        unwrapped.save_pretrained(folder, state_dict=state_dict)
    else:
        safetensors.torch.save_file(state_dict, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    for name, content in processing.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    torch.save(trainer.args, folder / TRAINING_ARGS_NAME)


def frozen_state(trainer: Trainer) -> TrainerState:
    """The Trainer's state as it is now, with what callbacks export of theirs, as `_save_checkpoint` completes it."""
    live = trainer.state
    for exporter in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(exporter, ExportableState):
            name, exported = type(exporter).__name__, exporter.state()
            if isinstance(live.stateful_callbacks.get(name), list):
                live.stateful_callbacks[name].append(exported)
            else:
                live.stateful_callbacks[name] = exported
    frozen = copy.copy(live)
    frozen.log_history = list(live.log_history)  # its records do not change once they are logged
    frozen.stateful_callbacks = copy.deepcopy(live.stateful_callbacks)
    return frozen


def rng_state(trainer: Trainer) -> dict[str, Any]:
    """As `Trainer._save_rng_state` collects it."""
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # the generator that Trainer seeds and restores
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        cuda = torch.cuda.random
        distributed_run = trainer.args.parallel_mode.value == "distributed"
        states["cuda"] = cuda.get_rng_state_all() if distributed_run else cuda.get_rng_state()
    return states


def rng_name(trainer: Trainer) -> str:
    args = trainer.args
    return "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"


def model_state(trainer: Trainer) -> dict[str, Any]:
    """The weights that `save_pretrained` will pick from; beside adapters the frozen base is not written, nor here."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    state_dict = model.state_dict()
    if not isinstance(model, PeftModel):
        return state_dict
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in state_dict.items() if name not in frozen}


def processing_files(trainer: Trainer) -> dict[str, bytes]:
    """The files of the tokenizer or processor, by relative path.

    Made once: they do not change, a large vocabulary takes a third of a second, and a tokenizer must not be read on
    one thread while the data pipeline uses it on another.
    """
    if not trainer.args.should_save:
        return {}
    processing = trainer.processing_class
    if processing is None:
        processing = getattr(trainer.data_collator, "tokenizer", None)
    if processing is None:
        return {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processing.save_pretrained(folder)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
