"""Collects the small files that checkpoints of every strategy have, in parts that are taken now and written later.

Each function names the method of Trainer that it follows; a test compares the files byte for byte. What the strategy
decides, weights and optimizer, is in `hfscale.checkpoint.captures`.
"""

import copy
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from transformers import Trainer
from transformers.trainer import SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState

from hfscale.checkpoint.formats.parameter_names import ParameterNames
from hfscale.core import distributed
from hfscale.core.durable_files import make_inside, write_atomically
from hfscale.core.host_memory import available_bytes
from hfscale.core.launch_variables import launch_number
from hfscale.core.logging import get_logger
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.core.versions import is_peft_model
from hfscale.trainer.state import model_of
from hfscale.trainer.strategies import Strategy

logger = get_logger(__name__)

SHARE_OF_FREE_MEMORY = 0.8
"""How much of the free memory of the host or of its container the copies of a checkpoint may take."""


def fits_in_host_memory(size_bytes: int, *, copies: int) -> bool:
    """Return whether copies of one size fit into the share of the free memory that they may take.

    Args:
        size_bytes (`int`): memory that one copy has yet to allocate, in bytes.
        copies (`int`): number of copies on this host, usually one per process.
    """
    return size_bytes * copies <= available_bytes() * SHARE_OF_FREE_MEMORY


def processes_on_this_host() -> int:
    """Return the number of processes that the launcher started on this host; 1 without a launcher."""
    return launch_number("LOCAL_WORLD_SIZE", 1)


# --- what Trainer writes --------------------------------------------------------------------------------------------


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, with the subfolders that their paths need.

    Args:
        folder (`Path`): the folder.
        files (`Mapping[str, bytes]`): the content of each file, by its path relative to the folder.
    """
    for name, content in files.items():
        make_inside(folder, (folder / name).parent)
        (folder / name).write_bytes(content)


def processing_files(trainer: Trainer) -> dict[str, bytes]:
    """Return the files of the tokenizer or processor.

    They are made once: they do not change, a large vocabulary takes a third of a second, and a tokenizer must not be
    read by one thread while the data pipeline uses it in another.

    Args:
        trainer (`Trainer`): its processing class, or else the tokenizer of its data collator, is written.

    Returns:
        `dict[str, bytes]`: the content of each file by its relative path; empty on ranks that do not write them, and
        if there is no tokenizer or processor.
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
        return _contents(folder)


def model_files(trainer: Trainer) -> dict[str, bytes]:
    """Return the files of the config (with adapters, of theirs) and of the tokenizer or processor.

    Args:
        trainer (`Trainer`): its model and its processing class are written.

    Returns:
        `dict[str, bytes]`: the content of each file by its relative path.
    """
    model: Any = trainer.model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if is_peft_model(model):
            model.peft_config[model.active_adapter].save_pretrained(name)
        else:
            model.config.save_pretrained(name)
            if model.can_generate():
                model.generation_config.save_pretrained(name)
        return _contents(folder) | processing_files(trainer)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def frozen_state(trainer: Trainer) -> TrainerState:
    """Return a copy of the Trainer's state with what its callbacks export, as `Trainer._save_checkpoint` collects it.

    Args:
        trainer (`Trainer`): its live state is completed too, with what the callbacks export.
    """
    live = trainer.state
    by_callback: Any = live.stateful_callbacks  # TrainerState makes a dictionary of the list
    for exporter in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(exporter, ExportableState):
            name = type(exporter).__name__
            exported = exporter.state()
            if isinstance(by_callback.get(name), list):
                by_callback[name].append(exported)
            else:
                by_callback[name] = exported
    frozen = copy.copy(live)
    frozen.log_history = list(live.log_history)  # its records do not change once they are logged
    frozen.stateful_callbacks = copy.deepcopy(live.stateful_callbacks)
    return frozen


def take_trainer_state(trainer: Trainer) -> Callable[[Path], None]:
    """Copy the Trainer's state, and return the function that writes it into the folder of a checkpoint.

    Args:
        trainer (`Trainer`): see `frozen_state`.
    """
    state = frozen_state(trainer)

    def write(folder: Path) -> None:
        state.save_to_json(str(folder / TRAINER_STATE_NAME))

    return write


def rng_state(trainer: Trainer) -> dict[str, Any]:
    """Return the states of this rank's random number generators, as `Trainer._save_rng_state` collects them.

    Args:
        trainer (`Trainer`): in a distributed run the states of all visible GPUs are returned, otherwise that of the
            current one.

    Returns:
        `dict[str, Any]`: the states under `python`, `numpy`, `cpu` and, with a GPU, `cuda`.
    """
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


def set_rng_state(states: dict[str, Any]) -> None:
    """Set this rank's random number generators to earlier states of this process.

    Args:
        states (`dict[str, Any]`): what `rng_state` returned.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    of_gpu = states.get("cuda")
    if of_gpu is None:
        return
    if isinstance(of_gpu, list):
        torch.cuda.set_rng_state_all(of_gpu)
    else:
        torch.cuda.set_rng_state(of_gpu)


def rng_name(trainer: Trainer) -> str:
    """Return the name of the file in which `Trainer._save_rng_state` writes this rank's `rng_state`.

    Args:
        trainer (`Trainer`): its arguments give the rank and the number of processes.
    """
    args = trainer.args
    return "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"


def take_rng_state(trainer: Trainer) -> Callable[[Path], None]:
    """Copy the states of this rank's generators, and return the function that writes them into a checkpoint's folder.

    Args:
        trainer (`Trainer`): see `rng_state`.
    """
    states, name = rng_state(trainer), rng_name(trainer)

    def write(folder: Path) -> None:
        torch.save(states, folder / name)

    return write


def schedule_state(trainer: Trainer) -> dict[str, Any]:
    """Return the states of the schedule and of the loss scale by file, as Trainer writes them.

    Args:
        trainer (`Trainer`): prepared for training.

    Returns:
        `dict[str, Any]`: the content for `torch.save` by the name of the file; empty under `save_only_model`.
    """
    if trainer.args.save_only_model:
        return {}
    assert trainer.lr_scheduler is not None  # Trainer makes it before the first step
    states = {SCHEDULER_NAME: trainer.lr_scheduler.state_dict()}
    scaler = trainer.accelerator.scaler
    if scaler is not None:
        states[SCALER_NAME] = scaler.state_dict()
    return states


def outer_state_name(name: str) -> str:
    """Return the file in which a checkpoint keeps this rank's tensors of `Announced.tensors`.

    Args:
        name (`str`): the name that was given there.
    """
    return f"{name}_outer_{distributed.rank()}.safetensors"


def take_tensors(
    sources: Mapping[str, Callable[[], dict[str, torch.Tensor]]],
) -> Callable[[Path], None]:
    """Copy tensors of this rank, and return the function that writes them into the folder of a checkpoint.

    Args:
        sources (`Mapping`): `Announced.tensors` of the Trainer's adapter.
    """
    taken = {outer_state_name(name): source() for name, source in sources.items()}

    def write(folder: Path) -> None:
        for name, tensors in taken.items():
            if tensors:
                safetensors.torch.save_file(tensors, folder / name)

    return write


def parameter_names(trainer: Trainer) -> ParameterNames | None:
    """Return the names of the optimizer's parameters, which another strategy needs and Trainer does not save.

    Call it between two steps. In a forward, FSDP2 puts other tensors in the place of the model's parameters, and after
    an evaluation it leaves those of the last layers there.

    Args:
        trainer (`Trainer`): the Trainer that is saved, under a strategy whose files do not name them.

    Returns:
        `ParameterNames` or `None`: the names; None if the optimizer steps tensors that are no parameters of the model,
        which is logged.
    """
    if trainer.optimizer is None:
        return None
    Strategy.of(trainer).reshard()
    try:
        return ParameterNames.of(model_of(trainer), trainer.optimizer.param_groups)
    except KeyError:
        logger.warning(
            "the optimizer steps tensors that are no parameters of the model: this run's checkpoints cannot be "
            "converted to another strategy"
        )
        return None


def take_parameter_names(trainer: Trainer) -> Callable[[Path], None]:
    """Return the function that writes `parameter_names` of this step into the folder of a checkpoint.

    Args:
        trainer (`Trainer`): see `parameter_names`.
    """
    names = parameter_names(trainer)

    def write(folder: Path) -> None:
        if names is not None:
            write_atomically(folder / PARAMETERS_NAME, names.to_json())

    return write
