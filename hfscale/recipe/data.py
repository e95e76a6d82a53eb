"""The training and evaluation sequences of a recipe."""

from transformers import PreTrainedTokenizerBase

from hfscale.errors import DataError
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.packing import pack
from hfscale.recipe.sources import AnyDataset, errors_name_source, load_splits, source_name
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)


def load_packed_datasets(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> tuple[AnyDataset, AnyDataset | None]:
    """Load the text of a recipe and pack it into sequences of exactly `block_size` tokens, without padding.

    Documents are tokenised, ended with the tokenizer's end-of-text token (and started with its beginning-of-text
    token if the tokenizer itself adds one, as those of Llama 3 and Gemma do), concatenated and cut. Empty documents
    are left out. The lines of a .txt file are one continuous text without marks between them.

    Packing works in batches of about a million tokens (64 blocks, if those are more); what remains of each batch,
    less than one block, is dropped. Call this on the main process first; the others then find the result in the
    cache.

    Args:
        args (`DataArguments`): the source of the text and the length of a sequence.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer of the model.
        seed (`int`): chooses the evaluation records of a source that has none of its own.

    Returns:
        `tuple`: the training sequences, and the evaluation sequences or None. Each record has `input_ids` and
        `labels`, both lists of `block_size` tokens.

    Raises:
        DataError: a file is missing, unreadable or not in the format of its extension, has no text column or too
            little text.
        StorageError: the cache of `datasets` cannot be written.
    """
    packed = {
        split: pack(records, tokenizer, args, split=split) for split, records in load_splits(args, seed=seed).items()
    }
    train = packed["train"]
    evaluation = packed.get("validation")
    if _is_empty(train, args, "train"):
        raise DataError(
            f"{source_name(args, 'train')} is shorter than one block of {args.block_size} tokens: give more text or "
            "lower --block_size"
        )
    if evaluation is not None and _is_empty(evaluation, args, "validation"):
        logger.info("no evaluation: its text is shorter than one block of %d tokens", args.block_size)
        evaluation = None
    return _first(train, args.max_train_samples), _first(evaluation, args.max_eval_samples)


def _is_empty(dataset: AnyDataset, args: DataArguments, split: str) -> bool:
    with errors_name_source(args, split):  # this is the first time that a stream is read
        return next(iter(dataset), None) is None


def _first(dataset: AnyDataset | None, count: int | None) -> AnyDataset | None:
    return dataset if dataset is None or count is None else dataset.take(count)
