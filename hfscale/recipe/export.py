"""The model that a recipe leaves in its output directory, complete for `from_pretrained` and `generate`."""

import copy
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, ProcessorMixin
from transformers.integrations import set_hf_deepspeed_config, unset_hf_deepspeed_config

from hfscale.core.collectives import TRAINING
from hfscale.core.logging import get_logger
from hfscale.core.run_files import AVERAGE_NAME
from hfscale.core.versions import is_peft_model
from hfscale.errors import UsageError
from hfscale.recipe.models import auto_class_of
from hfscale.trainer.generation import stop_tokens
from hfscale.trainer.state import output_folder
from hfscale.trainer.strategies import Strategy

if TYPE_CHECKING:
    from transformers import Trainer

logger = get_logger(__name__)

MERGED = "merged"
"""Folder in the output directory with the model into which the adapters are merged."""


def save_final_model(trainer: "Trainer", *, merge_adapters: bool = False) -> None:
    """Write the model (or adapter) and its tokenizer into the run's `output_dir`. Call it on every rank.

    The folder holds the chat template and a generation config, whose end-of-sequence tokens include the one that ends
    a turn of the chat template.

    Parameters are gathered one at a time into the host memory of rank 0, never on one GPU. That machine needs memory
    for the full model: 2 bytes per parameter after DeepSpeed in bf16, else 4. `check_compatibility` has checked
    before the training that a ZeRO-3 config allows the shards to be gathered.

    Args:
        trainer (`Trainer`): the trainer of the completed run.
        merge_adapters (`bool`): whether the model with its adapters merged is also written, into the folder `merged`
            of the output directory. The adapters stay in the output directory.

    Raises:
        UsageError: adapters are to be merged into a base model that has no name or folder.
    """
    # Checkpoints may be written in shards; the exported model is a single state dict.
    with Strategy.of(trainer).full_state_dicts():
        trainer.save_model()
    folder = output_folder(trainer.args)
    if trainer.args.should_save:
        _write_generation_config(trainer, folder)
        if (folder / AVERAGE_NAME).is_dir():
            _write_generation_config(trainer, folder / AVERAGE_NAME)
        if merge_adapters and is_peft_model(trainer.model):
            _merge_while_others_wait(trainer, folder)
    TRAINING.barrier("export")


def write_merged(adapter: Path, target: Path, *, auto_class: Any = AutoModelForCausalLM) -> None:
    """Merge an adapter into its base model and write the result. It needs host memory for one copy of the model.

    The base model is read again from where it was loaded, so nothing is needed from the training, and no GPU is used.
    The result has the data type of the base model's files.

    Args:
        adapter (`Path`): a folder of `PeftModel.save_pretrained`.
        target (`Path`): the folder to write; an earlier one is replaced when the new one is complete.
        auto_class (`type`): the class of transformers that finds the class of the base model.

    Raises:
        UsageError: the adapter does not name its base model.
    """
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    if not base:
        raise UsageError(
            f"the adapter in {adapter} does not name its base model, into which it could be merged: train adapters of "
            "a --model_name_or_path"
        )
    model = auto_class.from_pretrained(base, dtype="auto")
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    unfinished = target.with_name(f".{target.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    merged.save_pretrained(unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def _merge_while_others_wait(trainer: "Trainer", folder: Path) -> None:
    """Write the merged model from this rank alone, which takes no part in a collective meanwhile."""
    logger.info("merging the adapters into the base model on the CPU: %s", folder / MERGED)
    # Under ZeRO-3 transformers would shard the model over all ranks while it reads
    unset_hf_deepspeed_config()
    try:
        write_merged(folder, folder / MERGED, auto_class=auto_class_of(trainer.args))
    finally:
        if Strategy.of(trainer).engine_steps:
            set_hf_deepspeed_config(trainer.accelerator.state.deepspeed_plugin.hf_ds_config)
    _write_generation_config(trainer, folder / MERGED)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder / MERGED)


def _write_generation_config(trainer: "Trainer", folder: Path) -> None:
    """Write the model's generation config, which `save_pretrained` leaves out for adapters."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    config = copy.deepcopy(config)
    tokenizer: Any = trainer.processing_class
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = tokenizer.tokenizer
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        stops = stop_tokens(config, tokenizer)
        config.eos_token_id = stops[0] if len(stops) == 1 else stops or None
    config.save_pretrained(folder)
