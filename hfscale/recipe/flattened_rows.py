"""Rows of a batch that a Trainer of TRL puts one after another (`--packing`, `--padding_free`): their attention."""

import torch
from transformers import PreTrainedModel

from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.errors import UnsupportedModelError
from hfscale.recipe.arguments import RecipeTrainingMixin
from hfscale.recipe.document_attention import is_flash_attention, reason_not_to_cut
from hfscale.recipe.kernels import Kernels, use_fast_document_attention
from hfscale.recipe.model_arguments import ModelArguments
from hfscale.trainer.attention import attention_implementation
from hfscale.trainer.flattened_rows import documents_are_apart

logger = get_logger(__name__)


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
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    try:
        is_apart = documents_are_apart(model, device, collator)
    except Exception as error:  # whatever a model raises for sizes that it does not expect
        if "packed sequences apart" in str(error):  # transformers, where a kernel is not installed
            return None
        return reason_not_to_cut(model)
    if is_apart:
        return None
    if is_flash_attention(attention_implementation(config)):  # it has no mask
        return reason_not_to_cut(model)
    return "a document changes what the model computes for the next one"
