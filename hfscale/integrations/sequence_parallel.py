"""Ranks that share a sequence: batches that say which part is whose, and two mends for Ulysses under the Trainer."""

import copy
from collections import deque
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import transformers.trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


def collate_with_positions(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Batch equally long sequences, each with its positions: a rank that holds a part of one must know which part.

    Returns `input_ids`, `labels` and `position_ids`, each of shape (batch, sequence).
    """
    batch = {key: torch.tensor([feature[key] for feature in features]) for key in ("input_ids", "labels")}
    rows, length = batch["input_ids"].shape
    return batch | {"position_ids": torch.arange(length).expand(rows, -1).contiguous()}


def mend_sequence_parallel(trainer: "Trainer") -> None:
    """What transformers 5.23 with DeepSpeed 0.19 gets wrong when ranks share sequences (`sp_size` above 1).

    Call it between the making of the Trainer and `train()`; without sequence parallelism it does nothing.
    """
    if trainer.get_sp_size() > 1:
        _mend_gradient(trainer)
        _mend_skipping()


def _mend_gradient(trainer: "Trainer") -> None:
    """Under ZeRO-1 and 2, divide the gradient by the number of ranks that share a sequence.

    transformers 5.23's `deepspeed_sp_compute_loss` adds up the ranks' losses by a differentiable all-gather, whose
    backward sums over the ranks what each of them already has whole. ZeRO-3 makes up for it by averaging over all
    ranks; DeepSpeed 0.19's ZeRO-1 and 2 average over the data-parallel ones only. Adam hides the factor (clipping and
    the logged norm do not); SGD takes steps that much too long.
    """
    size = trainer.get_sp_size()
    if trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        return

    def divide(module: "PreTrainedModel", args: Any, output: Any) -> None:
        if module.training and output.loss is not None and output.loss.requires_grad:
            output.loss.register_hook(lambda gradient: gradient / size)

    trainer.model.register_forward_hook(divide)


def _mend_skipping() -> None:
    """Let a resumed run skip the batches it has seen: Trainer hands Accelerate the Ulysses adapter, not a loader."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    def skip_first_batches(loader: Any, count: int = 0) -> Any:
        if not isinstance(loader, UlyssesSPDataLoaderAdapter):
            return accelerate.skip_first_batches(loader, count)
        # One batch of the loader beneath becomes `sp_world_size` micro-batches, of one rank after the other.
        whole, rest = divmod(count, loader.sp_world_size)
        skipping = copy.copy(loader)  # for this epoch; the next begins with the whole loader again
        skipping.dl = accelerate.skip_first_batches(loader.dl, whole)
        skipping.iter, skipping.micro_batches = iter(skipping.dl), deque()
        for _ in range(rest):
            next(skipping)
        return skipping

    transformers.trainer.skip_first_batches = skip_first_batches
