"""Text in, packed sequences out."""

import math
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hfscale.errors import DataError
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.chat import IGNORED, document_marks
from hfscale.recipe.sources import AnyDataset, errors_name_source, is_continuous_text, shorten, source_name
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

_STRINGS = ("string", "large_string")

# One batch of packing holds about this many tokens or blocks, whichever is more.
_BATCH_TOKENS = 2**20
_BATCH_BLOCKS = 64
_BYTES_PER_TOKEN = 4
"""Used only to estimate how many records make such a batch."""
_SAMPLE_RECORDS = 32
"""Number of records that the estimate looks at."""
_PIECE_CHARACTERS = 2**14
"""Length of the pieces in which a continuous text is tokenised."""


def pack(dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, *, split: str) -> AnyDataset:
    """Tokenise the records of a split and pack them into sequences of `block_size` tokens, with their labels.

    Args:
        dataset (`Dataset` or `IterableDataset`): the raw records.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer of the model.
        args (`DataArguments`): the length of a sequence, the number of processes, and the names for error messages.
        split (`str`): `train` or `validation`.

    Returns:
        The sequences. Each record has `input_ids` and `labels`, both lists of `block_size` tokens. A streamed dataset
        is packed when it is read.

    Raises:
        DataError: the text cannot be read or has no text column.
        StorageError: the cache of `datasets` cannot be written.
    """
    with errors_name_source(args, split):
        sample = _sample(dataset)
        column = _text_column(dataset, sample, source=source_name(args, split))
        # `datasets` hashes the function's closure into the cache's name: keep it to values that change the result.
        block_size, is_continuous = args.block_size, is_continuous_text(args, split)
        begin, end = ([], []) if is_continuous else document_marks(tokenizer)

        def tokenize_and_pack(batch: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
            texts = [text or "" for text in batch[column]]
            texts = _join_lines(texts) if is_continuous else [text for text in texts if text.strip()]
            tokens: list[int] = []
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []:
                tokens += begin + ids + end
            full = len(tokens) // block_size * block_size
            blocks = [tokens[start : start + block_size] for start in range(0, full, block_size)]
            return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

        options: dict[str, Any] = {"batched": True, "batch_size": _batch_size(sample, column, block_size)}
        if isinstance(dataset, Dataset):
            options |= {"num_proc": args.preprocessing_num_workers, "desc": f"Packing into {block_size} tokens"}
        return dataset.map(tokenize_and_pack, remove_columns=dataset.column_names or list(sample[0]), **options)


def pack_documents(
    documents: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, *, split: str
) -> AnyDataset:
    """Pad each document at its end to a row of `block_size` tokens.

    Args:
        documents (`Dataset` or `IterableDataset`): records with `input_ids` and `labels`.
        tokenizer (`PreTrainedTokenizerBase`): gives the token of the padding.
        args (`DataArguments`): the length of a row, the number of processes, and the names for error messages.
        split (`str`): `train` or `validation`.

    Returns:
        The rows: records with `input_ids` and `labels`, both lists of `block_size` tokens.
    """
    block_size = args.block_size
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0

    def pad(document: dict[str, list[int]]) -> dict[str, list[int]]:
        missing = block_size - len(document["input_ids"])
        return {
            "input_ids": document["input_ids"] + [padding] * missing,
            "labels": document["labels"] + [IGNORED] * missing,
        }

    options: dict[str, Any] = {}
    if isinstance(documents, Dataset):
        options = {"num_proc": args.preprocessing_num_workers, "desc": f"Padding to {block_size} tokens"}
    with errors_name_source(args, split):
        return documents.map(pad, **options)


def _join_lines(lines: list[str]) -> list[str]:
    """Join lines into longer pieces: tokens may span line ends, and many pieces are tokenised in parallel."""
    pieces: list[str] = []
    start = characters = 0
    for number, line in enumerate(lines, start=1):
        characters += len(line)
        if characters >= _PIECE_CHARACTERS or number == len(lines):
            pieces.append("".join(lines[start:number]))
            start = number
            characters = 0
    return pieces


def _sample(dataset: AnyDataset) -> list[dict[str, Any]]:
    """Return a few records, spread over a prepared dataset or from the beginning of a stream."""
    if isinstance(dataset, IterableDataset):
        return list(dataset.take(_SAMPLE_RECORDS))
    return [dataset[number] for number in range(0, len(dataset), max(1, len(dataset) // _SAMPLE_RECORDS))]


def _text_column(dataset: AnyDataset, sample: list[dict[str, Any]], *, source: str) -> str:
    """Return the name of the column of text: `text`, or the only column of strings."""
    if not sample:
        raise DataError(f"{source} has no records")
    columns = dataset.column_names or list(sample[0])
    features = dataset.features or {}
    strings = [
        name
        for name in columns
        if getattr(features.get(name), "dtype", None) in _STRINGS
        or (name not in features and all(isinstance(record[name], str | None) for record in sample))
    ]
    if "text" in columns and "text" not in strings:
        raise DataError(f"{source}: not every 'text' is a string: convert the others or leave them out")
    if "text" in columns:
        return "text"
    if len(strings) == 1:
        logger.info("reads the column '%s' of %s", strings[0], source.partition(" ")[2])
        return strings[0]
    named = ", ".join(f"'{name}'" for name in columns)
    if {"chosen", "rejected"} <= set(columns):
        raise DataError(f"{source} has preferences ('chosen' and 'rejected'): train on them with recipes/dpo/train.py")
    raise DataError(
        f"{source} has no column 'text', only {shorten(named)}: rename the one to train on to 'text', 'messages' or "
        "'conversations', or two to 'prompt' and 'completion'"
    )


def _batch_size(sample: list[dict[str, Any]], column: str, block_size: int) -> int:
    """Return the number of records per batch, lines or books, with which the dropped remainders are small."""
    tokens = sum(len((record[column] or "").encode()) for record in sample) / len(sample) / _BYTES_PER_TOKEN
    return math.ceil(max(_BATCH_TOKENS, _BATCH_BLOCKS * block_size) / max(tokens, 1))
