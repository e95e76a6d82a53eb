"""Lets models generate during a training in which their weights are sharded."""

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformers import Trainer


def synchronize_generation(trainer: "Trainer") -> None:
    """Let `generate` of a model under Accelerate's FSDP2 run until all ranks have finished their samples.

    Each forward gathers the weights, which needs all ranks. transformers sets `synced_gpus` under ZeRO-3 and for its
    own FSDP only, so that the other ranks would hang when one of them has finished. Call it after the Trainer is made;
    under other strategies it does nothing.

    Args:
        trainer (`Trainer`): its model and the base model of its adapters are marked.
    """
    if trainer.is_fsdp_enabled:
        for module in trainer.model.modules():
            if isinstance(module, PreTrainedModel):
                module._is_fsdp_managed_module = True
