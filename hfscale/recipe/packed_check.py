"""Forward passes of rows that are no documents do not ask the device whether documents are packed.

Where a batch has neither a mask nor positions, a decoder of transformers counts the positions itself, and
`transformers.masking_utils.find_packed_sequence_indices` then reads from the device whether they restart: the host
waits for the GPU in every micro-batch, to learn what is known. The answer is given here without the device.
"""

from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, masking_utils

from hfscale.core.logging import get_logger
from hfscale.recipe.arguments import RecipeTrainingMixin
from hfscale.recipe.document_attention import makes_uncut_masks
from hfscale.trainer.strategies import Strategy
from hfscale.trainer.strategies.tensors import is_distributed_tensor

logger = get_logger(__name__)

_positions_are_counted: ContextVar[bool] = ContextVar("positions_are_counted", default=False)
"""Whether the forward pass that runs was given no positions, so that they do not restart."""
_find_packed = masking_utils.find_packed_sequence_indices


def answer_packed_check(trainer: Trainer) -> None:
    """Let the decoder of a recipe's Trainer know without the device that rows without positions are not packed.

    Nothing that is computed changes: batches with positions, with a mask or with a cache are examined as before. So
    are decoders whose masks were seen to depend on the tokens, models that are compiled as a whole, models that
    transformers has sharded while it loaded them, and pipeline stages.

    Args:
        trainer (`Trainer`): call it before `train()`.
    """
    args = trainer.args
    model: Any = trainer.model
    if not isinstance(args, RecipeTrainingMixin) or args.reads_images:
        return
    strategy = Strategy.of(trainer)
    if strategy.runs_stages or strategy.combination().compile_full:
        return
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    # The hooks of a model that is sharded already would gather its weights for the look at its masks
    is_sharded = any(is_distributed_tensor(parameter) for parameter in base.parameters())
    if is_sharded or not makes_uncut_masks(base):
        logger.debug("each micro-batch asks the device whether its rows are packed documents")
        return
    masking_utils.find_packed_sequence_indices = _find_packed_unless_counted
    base.base_model.register_forward_pre_hook(_note_inputs, with_kwargs=True)
    base.base_model.register_forward_hook(_forget_inputs, always_call=True)


def _find_packed_unless_counted(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Do what transformers' function does, which returns None for positions that do not restart.

    Args:
        position_ids (`torch.Tensor`): positions of the tokens, (rows, sequence).
    """
    if _positions_are_counted.get() and not torch.compiler.is_compiling():
        return None
    return _find_packed(position_ids)


def _note_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = (kwargs.get(name) for name in ("attention_mask", "position_ids", "past_key_values"))
    _positions_are_counted.set(len(args) <= 1 and all(value is None for value in given))


def _forget_inputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    _positions_are_counted.set(False)
