"""The trained model as a folder for `from_pretrained`, whatever the strategy."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Trainer


def save_final_model(trainer: "Trainer") -> None:
    """Write the model (or adapter) and its tokenizer into the run's `output_dir`. Call it on every rank.

    Parameters are put together one at a time and go to the memory of rank 0's machine, never to one GPU: it needs room
    there for the whole model, 2 bytes per parameter after DeepSpeed in bf16, else 4. That a ZeRO-3 config lets the
    shards be put together is checked before the training, by `hfscale.recipe.compatibility.check_pairs`.
    """
    if trainer.is_fsdp_enabled:
        # Checkpoints are written in shards; this one is for others to load.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model()
