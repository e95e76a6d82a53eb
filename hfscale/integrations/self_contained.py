"""What Trainer leaves out of a checkpoint and another strategy, or `from_pretrained`, will ask for."""

from pathlib import Path

from peft import PeftModel
from transformers import Trainer

from hfscale.checkpoint.formats.parameter_names import PARAMETERS_NAME, ParameterNames
from hfscale.checkpoint.store import write_atomically
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)


def complete_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Add the names of the optimizer's parameters, and under FSDP2 the model's config and tokenizer.

    Call it on one rank, when Trainer has written the checkpoint and before it is committed. A few kilobytes; nothing
    that Trainer wrote is changed.
    """
    if trainer.is_distributed_loading_by_transformers:
        return  # each rank has some of the parameters; `ParallelTrainer` writes all of this itself
    model, optimizer = trainer.model, trainer.optimizer
    if optimizer is not None and not trainer.is_deepspeed_enabled:  # DeepSpeed's files name them, its groups do not
        try:
            names = ParameterNames.of(model, optimizer.param_groups)
        except KeyError:
            logger.warning(
                "the optimizer steps tensors that are no parameters of the model: this run's checkpoints cannot be "
                "converted to another strategy"
            )
        else:
            write_atomically(checkpoint / PARAMETERS_NAME, names.to_json())
    if not trainer.is_fsdp_enabled:
        return
    if isinstance(model, PeftModel):
        model.peft_config[model.active_adapter].save_pretrained(str(checkpoint))
    elif hasattr(model, "config"):
        model.config.save_pretrained(checkpoint)
        if model.can_generate():
            model.generation_config.save_pretrained(checkpoint)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(checkpoint)
