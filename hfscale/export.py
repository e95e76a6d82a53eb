"""The trained model as a folder for `from_pretrained`, whatever the strategy."""

from typing import TYPE_CHECKING

from hfscale.errors import UsageError

if TYPE_CHECKING:
    from transformers import Trainer


def save_final_model(trainer: "Trainer") -> None:
    """Write the model (or adapter) and its tokenizer into the run's `output_dir`. Call it on every rank.

    Parameters are put together one at a time and go to the memory of rank 0's machine, never to one GPU: it needs room
    there for the whole model, 2 bytes per parameter after DeepSpeed in bf16, else 4.

    Raises:
        UsageError: under ZeRO-3, the DeepSpeed config does not let the shards be put together.
    """
    if trainer.is_fsdp_enabled:
        # Checkpoints are written in shards; this one is for others to load.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    if trainer.is_deepspeed_enabled:
        zero = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config.get("zero_optimization", {})
        if zero.get("stage") == 3 and not zero.get("stage3_gather_16bit_weights_on_model_save"):
            raise UsageError(
                "the DeepSpeed config has no stage3_gather_16bit_weights_on_model_save: set it to true to have the "
                "model as one folder; the checkpoints hold the weights in parts"
            )
    trainer.save_model()
