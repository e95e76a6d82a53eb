"""The precision in which FSDP2 reduces gradients."""

from dataclasses import replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer

from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.fsdp2 import Fsdp2


def sum_gradients_in_fp32(trainer: Trainer) -> None:
    """Have FSDP2 reduce gradients in fp32 and leave the loss as it is. Call it before `trainer.train()`.

    Accelerate (1.15, `FullyShardedDataParallelPlugin.set_mixed_precision`) reduces them in the format of the matrix
    products. That is also the format in which unsharded gradients are accumulated without `sync_each_batch`, and to
    which FSDP2 rounds the loss, to three digits. torchtitan and `ParallelTrainer` reduce in fp32. Under other
    strategies and in fp32 nothing is done.

    Args:
        trainer (`Trainer`): its policy of mixed precision is replaced.
    """
    if not isinstance(Strategy.of(trainer), Fsdp2):
        return
    plugin = trainer.accelerator.state.fsdp_plugin
    if isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
        )
