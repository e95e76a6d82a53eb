"""Collects what a checkpoint consists of, in parts that can be copied now and written later.

There is a part for what Trainer writes itself, one for FSDP2's shards, and one for DeepSpeed's partitions. Each
function names the method of Trainer or Accelerate that it follows; a test compares the files byte for byte.
"""

import copy
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import PreTrainedModel, Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.utils import SAFE_WEIGHTS_NAME

from hfscale.checkpoint.formats.dcp import save_shards
from hfscale.checkpoint.formats.parameter_names import ParameterNames
from hfscale.checkpoint.host_copy import HostCopy
from hfscale.core import distributed
from hfscale.core.collectives import SAVING
from hfscale.core.durable_files import write_atomically
from hfscale.core.host_memory import available_bytes
from hfscale.core.logging import get_logger
from hfscale.core.run_files import PARAMETERS_NAME
from hfscale.core.versions import is_distributed_by_transformers, is_peft_model
from hfscale.trainer.state import model_of

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
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


# --- what Trainer writes --------------------------------------------------------------------------------------------


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
    trainer: Trainer, folder: Path, state_dict: dict[str, Any], processing: dict[str, bytes]
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


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    """Write files into a folder, with the subfolders that their paths need.

    Args:
        folder (`Path`): the folder.
        files (`dict[str, bytes]`): the content of each file, by its path relative to the folder.
    """
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
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


def rng_name(trainer: Trainer) -> str:
    """Return the name of the file in which `Trainer._save_rng_state` writes this rank's `rng_state`.

    Args:
        trainer (`Trainer`): its arguments give the rank and the number of processes.
    """
    args = trainer.args
    return "rng_state.pth" if args.world_size <= 1 else f"rng_state_{args.process_index}.pth"


def outer_state_name(name: str) -> str:
    """Return the file in which a checkpoint keeps this rank's tensors of `TrainerAdapter.save_tensors`.

    Args:
        name (`str`): the name that was given there.
    """
    return f"{name}_outer_{distributed.rank()}.safetensors"


def take_tensors(
    sources: Mapping[str, Callable[[], dict[str, torch.Tensor]]],
) -> Callable[[Path], None]:
    """Copy tensors of this rank, and return the function that writes them into the folder of a checkpoint.

    Args:
        sources (`Mapping`): `saved_tensors` of the Trainer's adapter.
    """
    taken = {outer_state_name(name): source() for name, source in sources.items()}

    def write(folder: Path) -> None:
        for name, tensors in taken.items():
            safetensors.torch.save_file(tensors, folder / name)

    return write


def parameter_names(trainer: Trainer) -> ParameterNames | None:
    """Return the names of the optimizer's parameters, which another strategy needs and Trainer does not save.

    Call it between two steps: during a forward, FSDP2 puts other tensors in the place of the model's parameters.

    Args:
        trainer (`Trainer`): the Trainer that is saved.

    Returns:
        `ParameterNames` or `None`: the names; None if the files of the strategy name the parameters themselves, or if
        the optimizer steps tensors that are no parameters of the model, which is logged.
    """
    if is_distributed_by_transformers(trainer):
        # Each rank has some of the parameters; `ParallelTrainer` writes all of this itself
        return None
    # DeepSpeed's files name them, its groups do not
    if trainer.optimizer is None or trainer.is_deepspeed_enabled:
        return None
    try:
        return ParameterNames.of(model_of(trainer), trainer.optimizer.param_groups)
    except KeyError:
        logger.warning(
            "the optimizer steps tensors that are no parameters of the model: this run's checkpoints cannot be "
            "converted to another strategy"
        )
        return None


def complete_checkpoint(trainer: Trainer, checkpoint: Path, names: ParameterNames | None) -> None:
    """Add the files that Trainer leaves out of a checkpoint and that another strategy or `from_pretrained` needs.

    These are the names of the optimizer's parameters and, under FSDP, the model's config and tokenizer. Call it on one
    rank, after Trainer has written the checkpoint and before it is committed. It writes a few kilobytes and changes
    nothing that Trainer wrote.

    Args:
        trainer (`Trainer`): the Trainer that is saved.
        checkpoint (`Path`): the folder of the checkpoint.
        names (`ParameterNames`, *optional*): what `parameter_names` returned for this step.
    """
    if names is not None:
        write_atomically(checkpoint / PARAMETERS_NAME, names.to_json())
    if not trainer.is_fsdp_enabled or is_distributed_by_transformers(trainer):
        return
    model: Any = trainer.model
    if is_peft_model(model):
        model.peft_config[model.active_adapter].save_pretrained(str(checkpoint))
    elif hasattr(model, "config"):
        model.config.save_pretrained(checkpoint)
        if model.can_generate():
            model.generation_config.save_pretrained(checkpoint)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(checkpoint)


# --- FSDP2 ----------------------------------------------------------------------------------------------------------


def is_sharded_fsdp2(trainer: Trainer) -> bool:
    """Return whether this is FSDP2 with checkpoints of one part per rank (`SHARDED_STATE_DICT`).

    Args:
        trainer (`Trainer`): a Trainer under FSDP.
    """
    plugin = trainer.accelerator.state.fsdp_plugin
    return bool(plugin.fsdp_version == 2 and plugin.state_dict_type.name == "SHARDED_STATE_DICT")


_FSDP_PARTS = {"model": FSDP_MODEL_NAME, "optimizer": OPTIMIZER_NAME}


class FsdpStateCopy:
    """Copies this rank's FSDP2 shards to host memory, into the same buffers each time.

    Then `save_shards` writes, on our thread: so model and optimizer follow each other on one channel, and the manifest
    follows both. The layout is the one that accelerate reads,
    `pytorch_model_fsdp_0/` and `optimizer_0/` with one file per rank in each.

    Args:
        trainer (`Trainer`): prepared for training under FSDP2.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._host_copy = HostCopy()

    def bytes(self) -> int:
        """Return the host memory in bytes that the next copy would allocate on this rank."""
        return self._host_copy.bytes_to_allocate(self._live())

    def take(self, ranks_per_node: int | None) -> Callable[[Path], None]:
        """Copy the shards, and return the function that writes the copy. Every rank must call both.

        Args:
            ranks_per_node (`int`, *optional*): as for `save_shards`.

        Returns:
            `Callable`: to be called with the folder of the checkpoint, before the next `take`.
        """
        copied = self._host_copy.take(self._live())

        def write(folder: Path) -> None:
            for key, name in _FSDP_PARTS.items():
                save_shards(
                    {key: copied[key]}, folder / f"{name}_0", SAVING, ranks_per_node=ranks_per_node
                )

        return write

    def _live(self) -> dict[str, Any]:
        """Collect model and optimizer as accelerate's `save_fsdp_model` and `save_fsdp_optimizer` do.

        With PEFT only the adapters are collected.
        """
        model: Any = self._trainer.model
        options = StateDictOptions()
        if is_peft_model(model):
            from peft import get_peft_model_state_dict

            weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        else:
            weights = get_model_state_dict(model, options=options)
        optimizer = self._trainer.optimizer
        assert optimizer is not None  # there is one in a training
        return {
            "model": weights,
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }


# --- DeepSpeed ------------------------------------------------------------------------------------------------------


def can_defer(trainer: Trainer) -> bool:
    """Return whether the DeepSpeed engine writes in the training process, at the moment when it is told to save.

    Args:
        trainer (`Trainer`): prepared for training under DeepSpeed.
    """
    engine = getattr(trainer.model_wrapped, "checkpoint_engine", None)
    return (
        engine is not None
        and not engine.is_decoupled()
        and type(engine).__name__ == "TorchCheckpointEngine"
    )


class DeferredWrites:
    """Takes the place of DeepSpeed's checkpoint engine during a save, and writes later what the engine was given.

    DeepSpeed's engine gathers the tensors and names the files; only the writing is deferred, with copies in host
    memory. DeepSpeed itself clones the tensors of model states only. What does not fit into the host's free memory is
    written at once. Everything but `save` is answered by the original checkpoint engine.

    DeepSpeed's own asynchronous writers (`checkpoint.writer` in its config, 0.19.8) are not used: they write from
    another process at a time of their own and commit inside a later step, so that neither a manifest nor a rename can
    follow them.

    Args:
        trainer (`Trainer`): prepared for training under DeepSpeed.
        host_copy (`HostCopy`): keeps the buffers for the copies.
    """

    def __init__(self, trainer: Trainer, host_copy: HostCopy) -> None:
        self._deepspeed: Any = trainer.model_wrapped
        self._host_copy = host_copy
        self._original: Any = self._deepspeed.checkpoint_engine
        self._given: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a file for later, or write it at once if it does not fit into memory. DeepSpeed calls it for each file.

        Args:
            state_dict (`Any`): the content, with live tensors.
            path (`str`): the path of the file.
        """
        wanted = self._host_copy.bytes_to_allocate(
            [*(given for given, _ in self._given), state_dict]
        )
        if fits_in_host_memory(wanted, copies=processes_on_this_host()):
            # It may lead through a link that is removed
            self._given.append((state_dict, os.path.realpath(path)))
        else:
            self._original.save(state_dict, path)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Have DeepSpeed save to this object within the `with` block, at whose end the tensors are copied."""
        self._given = []
        self._deepspeed.checkpoint_engine = self
        try:
            yield
        finally:
            self._deepspeed.checkpoint_engine = self._original
            copied = self._host_copy.take([state_dict for state_dict, _ in self._given])
            self._given = [
                (copy, path) for copy, (_, path) in zip(copied, self._given, strict=True)
            ]

    def write(self, folder: Path) -> None:
        """Write the copies, by the original engine, to the paths that DeepSpeed gave.

        Args:
            folder (`Path`): the folder of the checkpoint; it is not used, because the paths contain it.
        """
        given, self._given = self._given, []
        for state_dict, path in given:
            self._original.save(state_dict, path)
