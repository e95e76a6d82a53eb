"""Rows of a batch that a Trainer of TRL puts one after another (`--packing`, `--padding_free`): their attention.

TRL passes where each document begins, in all forms that transformers has for it. Whether a model uses one of them
depends on its family, and neither TRL nor transformers says so where it uses none: each document sees those before it.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.errors import UnsupportedModelError
from hfscale.facts.experts import COUNTS_OF_EXPERTS
from hfscale.recipe.arguments import RecipeTrainingMixin
from hfscale.recipe.document_attention import is_flash_attention, reason_not_to_cut
from hfscale.recipe.kernels import Kernels, use_fast_document_attention
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.trainer.attention import (
    attention_implementation,
    forget_attention_implementation,
)
from hfscale.trainer.small_model import make_config_small, switch_dropout_off
from hfscale.trainer.strategies.tensors import class_without_shards

logger = get_logger(__name__)

_VOCABULARY, _EXPERTS = 64, 16
_FIRST, _SECOND = 5, 7
"""Tokens of two documents."""
_TOLERANCE = 1e-4
"""Relative difference of logits in fp32 that rounding explains."""


def cut_flattened_rows(
    model: PreTrainedModel, args: ModelArguments, training_args: RecipeTrainingMixin
) -> None:
    """Prepare a model for batches whose rows are one sequence, in which `position_ids` restart with each document.

    It gets the fastest attention that skips what documents hide from each other, unless `--attn_implementation` names
    another. For flex_attention, batches are padded to a multiple of `--max_length`: it is compiled for each length.

    Args:
        model (`PreTrainedModel`): a causal language model, not yet wrapped for training.
        args (`ModelArguments`): the flags of the model.
        training_args (`RecipeTrainingMixin`): the flags of one of TRL's Trainers; changed in place.

    Raises:
        UnsupportedModelError: documents would see those before them.
    """
    given = vars(training_args)
    if args.attn_implementation is None:
        use_fast_document_attention(model, Kernels.here(training_args))
    reason = _reason_not_to_flatten(model, training_args.device)
    if reason is not None:
        flag = "packing" if given["packing"] else "padding_free"
        asked, fix = spelled(flag, True), spelled(flag, False)
        raise UnsupportedModelError(
            f"{asked} puts the documents of a batch one after another, and the attention of {type(model).__name__} "
            f"is not cut between them: {reason}; give {fix}"
        )
    training_args.cuts_attention = True
    if attention_implementation(model.config) != "flex_attention" or not given.get("packing"):
        return
    if given["pad_to_multiple_of"] is None:
        given["pad_to_multiple_of"] = given["max_length"]
        logger.info(
            "batches: padded to a multiple of max_length (%d), since flex_attention is compiled for each length "
            "(--pad_to_multiple_of: another number)",
            given["max_length"],
        )


def _reason_not_to_flatten(model: PreTrainedModel, device: torch.device) -> str | None:
    """Return why documents of a row would see each other; None if they do not, or the training says so itself."""
    config = model.config
    if (
        config.get_text_config() is not config
    ):  # what small models of several modalities need is not known
        return reason_not_to_cut(model)
    try:
        is_apart = _keeps_apart(model, device)
    except Exception as error:  # whatever a model raises for sizes that it does not expect
        if "packed sequences apart" in str(error):  # transformers, where a kernel is not installed
            return None
        return reason_not_to_cut(model)
    if is_apart:
        return None
    if is_flash_attention(attention_implementation(config)):  # it has no mask
        return reason_not_to_cut(model)
    return "a document changes what the model computes for the next one"


def _keeps_apart(model: PreTrainedModel, device: torch.device) -> bool:
    """Compute the logits of a document after two others, with a small model of the same config, and compare them."""
    config = copy.deepcopy(model.config)
    make_config_small(config)
    config.vocab_size = _VOCABULARY
    for name in COUNTS_OF_EXPERTS:
        if (getattr(config, name, None) or 0) > _EXPERTS:
            setattr(config, name, _EXPERTS)
    if config.pad_token_id is not None:
        config.pad_token_id = 0
    config.use_cache = False
    forget_attention_implementation(config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        small = class_without_shards(model)(config).to(device=device, dtype=torch.float32).eval()
        switch_dropout_off(small)
        first, other, second = (
            torch.randint(_VOCABULARY, (1, length), device=device)
            for length in (_FIRST, _FIRST, _SECOND)
        )
    with torch.no_grad():
        after_first, after_other = (
            small(input_ids=torch.cat([before, second], 1), **_boundaries(device)).logits[
                0, _FIRST:
            ]
            for before in (first, other)
        )
    difference = (after_first - after_other).abs().max()
    return bool(difference <= _TOLERANCE * after_first.abs().max())


def _boundaries(device: torch.device) -> dict[str, Any]:
    """Return what TRL's collator passes with two documents."""
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])
    lengths = torch.tensor([0, _FIRST, _FIRST + _SECOND], dtype=torch.int32, device=device)
    of_token = torch.repeat_interleave(torch.arange(2), torch.tensor([_FIRST, _SECOND]))
    return {
        "position_ids": positions.unsqueeze(0).to(device),
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths,
        "max_length_q": _SECOND,
        "max_length_k": _SECOND,
        "seq_idx": of_token.unsqueeze(0).to(device=device, dtype=torch.int32),
    }
