"""The training and evaluation sequences of a recipe."""

from itertools import groupby, islice
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedTokenizerBase

from hfscale.core.logging import get_logger
from hfscale.core.spelling import speaking
from hfscale.errors import DataError, UsageError
from hfscale.recipe.arguments import DataArguments, SourceArguments, check_evaluation
from hfscale.recipe.chat import IGNORED, chat_format, to_documents, use_chat_template
from hfscale.recipe.packing import (
    pack,
    pack_documents,
    pack_tokens,
    set_packing_defaults,
    text_only,
    tokens_only,
)
from hfscale.recipe.sources import (
    HELD_OUT,
    AnyDataset,
    columns_of,
    errors_name_source,
    limit_splits,
    load_splits,
    source_name,
)
from hfscale.recipe.token_files import COLUMN

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = get_logger(__name__)

_CHAT = "conversations"
_TEXT = "text"
_TOKENS = "tokens"
_PACK = {_CHAT: pack_documents, _TEXT: pack, _TOKENS: pack_tokens}
"""What a source has -> how its records become rows."""


@speaking("recipe")
def load_datasets(
    data_args: DataArguments, training_args: "TrainingArguments", tokenizer: PreTrainedTokenizerBase
) -> tuple[AnyDataset, AnyDataset | None]:
    """Load the text or the conversations of a recipe as rows of `--block_size` tokens. Use `one_process_prepares`.

    Args:
        data_args (`DataArguments`): the source, how documents become rows, and what is trained on. `packing` and
            `document_attention` are set where they were left out.
        training_args (`TrainingArguments`): the seed chooses evaluation records where the source has none of its own.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer of the model. `--chat_template` replaces its template.

    Returns:
        `tuple`: the training rows, and the evaluation rows or None, with `input_ids` and `labels`; with document
        attention also `position_ids`. `RowCollator` makes batches of them.

    Raises:
        DataError: the source cannot be read, is not in the format of its name, or has too little to train on.
        UsageError: a flag does not fit the data, or evaluations are requested without data for them.
        StorageError: the cache of `datasets` cannot be written.
    """
    train, evaluation = load_packed_datasets(data_args, tokenizer, seed=training_args.seed)
    check_evaluation(training_args, has_evaluation=evaluation is not None)
    return train, evaluation


def load_packed_datasets(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> tuple[AnyDataset, AnyDataset | None]:
    """Load the text or the conversations of a recipe as rows of `block_size` tokens.

    `args.packing` and `args.document_attention` are set where they were left out; `hfscale.recipe.packing` explains
    them.

    Text: documents are tokenised, ended with the tokenizer's end-of-text token (and started with its beginning-of-text
    token if the tokenizer itself adds one, as those of Llama 3 and Gemma do), concatenated and cut. Empty documents
    are left out. The lines of a .txt file are one continuous text without marks between them. Packing works in
    batches of about a million tokens (64 blocks, if those are more); what remains of each batch, less than one
    block, is dropped.

    Records with `input_ids`, and datatrove's token files (`hfscale.recipe.token_files`), are tokenised already: their
    documents are packed as they are, with the marks that they have, and with their `labels` if there are any.

    Records with `messages`, `conversations` (ShareGPT) or `prompt` and `completion` become one document each, rendered
    with the chat template, whose labels mark the tokens that `--loss_on` names. Records that cannot be trained on are
    left out, and reported with their number and the first row.

    Without a source, the embedded text is used, or the embedded conversations if a flag for conversations is given.

    Call this on the main process first; the others then find the result in the cache.

    Args:
        args (`DataArguments`): the source of the text, the length of a sequence, and what is trained on.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer of the model. `--chat_template` replaces its template.
        seed (`int`): chooses the evaluation records of a source that has none of its own.

    Returns:
        `tuple`: the training sequences, and the evaluation sequences or None. Each record has `input_ids` and
        `labels`, both lists of `block_size` tokens. With document attention they have `position_ids` too; with
        `--packing none` their lengths differ, and `RowCollator` makes batches of them.

    Raises:
        DataError: a file is missing, unreadable or not in the format of its extension, has no known column, records of
            several formats, an empty conversation or too little text.
        UsageError: the tokenizer has no chat template, or `--loss_on` does not fit the format.
        StorageError: the cache of `datasets` cannot be written.
    """
    if args.chat_template:
        use_chat_template(tokenizer, args.chat_template)
    kinds: dict[str, str] = {}  # what a source has, by its name

    def convert(records: AnyDataset, source: SourceArguments, split: str) -> AnyDataset:
        with errors_name_source(source, split):
            kind = _kind_of(records)
        kinds[source_name(source, split)] = kind
        _check_kinds(kinds)
        if kind == _CHAT:
            documents = to_documents(records, tokenizer, cast(DataArguments, source), split=split)
            if split == "train":
                _show_samples(documents, tokenizer, args)
            return documents
        if not args.data_mix:
            return records
        return tokens_only(records) if kind == _TOKENS else text_only(records, source, split=split)

    is_for_chat = args.chat_template or args.loss_on not in (None, "all")
    splits = load_splits(
        args, seed=seed, embedded="chat" if is_for_chat else "text", convert=convert
    )
    kind = next(iter(kinds.values()))
    is_chat = kind == _CHAT
    if is_for_chat and not is_chat:
        given = (
            f"--chat_template {args.chat_template}"
            if args.chat_template
            else f"--loss_on {args.loss_on}"
        )
        raise UsageError(
            f"{given} is for conversations, and {source_name(args, 'train')} has {kind}: leave it out, or give data "
            "with 'messages', 'conversations' or 'prompt' and 'completion'"
        )
    set_packing_defaults(args, is_chat=is_chat)
    packed = {
        split: _PACK[kind](records, tokenizer, args, split=_named(split))
        for split, records in splits.items()
    }
    train = packed["train"]
    evaluated = HELD_OUT if HELD_OUT in packed else "validation"
    if _is_empty(train, args, "train"):
        raise DataError(
            f"{source_name(args, 'train')} has no sample that can be trained on: see the warnings above"
            if is_chat
            else f"{source_name(args, 'train')} is shorter than one block of {args.block_size} tokens: give more text "
            "or lower --block_size"
        )
    if evaluated in packed and _is_empty(packed[evaluated], args, "validation"):
        logger.info(
            "no evaluation: its text is shorter than one block of %d tokens", args.block_size
        )
        del packed[evaluated]
    if not is_chat:
        _show_samples(train, tokenizer, args)
    return limit_splits(packed, train=args.max_train_samples, evaluation=args.max_eval_samples)


def _kind_of(records: AnyDataset) -> str:
    """Return what records have: conversations, tokens or text."""
    if chat_format(records) is not None:
        return _CHAT
    columns = columns_of(records)
    return _TOKENS if COLUMN in columns and "text" not in columns else _TEXT


def _check_kinds(kinds: dict[str, str]) -> None:
    """Check that all sources have conversations, or all text, or all tokens."""
    (first, kind), *others = kinds.items()
    for name, other in others:
        if other != kind:
            raise DataError(f"{first} has {kind} and {name} has {other}: give both in one format")


def _show_samples(
    dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments
) -> None:
    if args.show_samples:
        logger.info("training data:\n%s", describe_samples(dataset, tokenizer, args.show_samples))


def _is_empty(dataset: AnyDataset, args: DataArguments, split: str) -> bool:
    with errors_name_source(args, split):  # this is the first time that a stream is read
        return next(iter(dataset), None) is None


def _named(split: str) -> str:
    """Return the name of a split for errors and caches."""
    return "validation" if split == HELD_OUT else split


def describe_samples(dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
    """Describe the first samples of a dataset: for each stretch of masked or trained tokens a line with its text.

    Args:
        dataset (`Dataset` or `IterableDataset`): records with `input_ids` and `labels`.
        tokenizer (`PreTrainedTokenizerBase`): decodes the tokens.
        count (`int`): the number of samples.
    """
    lines = []
    for number, sample in enumerate(islice(dataset, count), start=1):
        tokens = list(zip(sample["input_ids"], sample["labels"], strict=True))
        trained = sum(label != IGNORED for _, label in tokens)
        lines.append(f"sample {number}: {len(tokens)} tokens, {trained} trained on")
        for is_trained, stretch in groupby(tokens, key=lambda token: token[1] != IGNORED):
            text = tokenizer.decode(
                [token for token, _ in stretch], clean_up_tokenization_spaces=False
            )
            lines.append(f"  {'trained' if is_trained else 'masked '} {text!r}")
    return "\n".join(lines)
