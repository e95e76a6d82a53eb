"""Packing of documents into rows, the sequences of tokens that a model is trained on.

A document is a list of tokens and their labels. `--packing` chooses how documents become rows:

| value | a row is | document_attention |
|---|---|---|
| `concat` | the next `block_size` tokens of all documents, one after the other | false by default |
| `bestfit` | documents that together fill `block_size` tokens as well as possible, then padding | true by default |
| `none` | one document; a batch is padded to its longest | has no effect |

With document attention a row has `position_ids` that restart at 0 with each document, and no attention mask:
transformers then cuts attention at the boundaries. The first token of a document has the label -100, because it would
be predicted from the previous document. Each token of the padding is a document of its own.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from hfscale.core.logging import get_logger
from hfscale.errors import DataError
from hfscale.recipe.arguments import DataArguments, SourceArguments
from hfscale.recipe.chat import IGNORED, document_marks
from hfscale.recipe.preparation import kept_environment, worker_processes
from hfscale.recipe.sources import (
    AnyDataset,
    columns_of,
    errors_name_source,
    is_continuous_text,
    shorten,
    source_name,
)
from hfscale.recipe.token_files import check_vocabulary, is_mapped, largest_token, mapped_rows

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

Document = tuple[list[int], list[int]]
"""Tokens and their labels, which are as long and not shifted."""
Rows = dict[str, list[list[int]]]
"""Columns of `datasets`: for each name one list per row."""


def set_packing_defaults(args: DataArguments, *, is_chat: bool) -> None:
    """Set `args.packing` and `args.document_attention` where the flags were left out.

    Args:
        args (`DataArguments`): changed in place.
        is_chat (`bool`): whether the records are conversations, or prompts with completions, and not plain text.
    """
    args.packing = args.packing or ("bestfit" if is_chat else "concat")
    if args.document_attention is None:
        args.document_attention = args.packing == "bestfit"


def pack(
    dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, *, split: str
) -> AnyDataset:
    """Tokenise the records of a split, which are plain text, and pack them into rows.

    Args:
        dataset (`Dataset` or `IterableDataset`): the raw records.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer of the model.
        args (`DataArguments`): how to pack, the number of processes, and the names for error messages.
        split (`str`): `train` or `validation`.

    Returns:
        The rows. Each has the columns of `pack_rows`. A streamed dataset is packed when it is read.

    Raises:
        DataError: the text cannot be read or has no text column.
        StorageError: the cache of `datasets` cannot be written.
    """
    with errors_name_source(args, split):
        sample = _sample(dataset)
        column = _text_column(dataset, sample, source=source_name(args, split))
        # `datasets` hashes the function's closure into the cache's name: keep it to values that change the result.
        options = _row_options(tokenizer, args)
        is_continuous = is_continuous_text(args, split)
        begin, end = ([], []) if is_continuous else document_marks(tokenizer)

        def tokenize(batch: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
            texts = [text if text and text.strip() else "" for text in batch[column]]
            found = (
                tokenizer(list(filter(None, texts)), add_special_tokens=False, verbose=False)
                if any(texts)
                else {}
            )
            tokens = iter(found.get("input_ids", ()))
            return {"input_ids": [begin + next(tokens) + end if text else [] for text in texts]}

        def pack_tokens(batch: dict[str, list[list[int]]]) -> Rows:
            return pack_rows(((tokens, tokens) for tokens in batch["input_ids"]), **options)

        def tokenize_and_pack(batch: dict[str, list[str | None]]) -> Rows:
            if not is_continuous:
                return pack_tokens(tokenize(batch))
            pieces = _join_lines([text or "" for text in batch[column]])
            tokenised = (
                tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
                if pieces
                else []
            )
            return pack_tokens({"input_ids": [list(chain(*tokenised))]})

        mean = (
            sum(len((record[column] or "").encode()) for record in sample)
            / len(sample)
            / _BYTES_PER_TOKEN
        )
        columns = dataset.column_names or list(sample[0])
        # A fast tokenizer uses all cores by itself.
        wanted = args.preprocessing_num_workers or (1 if tokenizer.is_fast else None)
        workers = (
            1
            if isinstance(dataset, IterableDataset) or is_continuous
            else worker_processes(wanted, len(dataset))
        )
        if workers == 1:
            return _map(dataset, tokenize_and_pack, columns, mean, args)
        with kept_environment():
            tokens = dataset.map(
                tokenize,
                batched=True,
                remove_columns=columns,
                num_proc=workers,
                desc=f"Tokenising {split} text",
            )
        return _map(tokens, pack_tokens, ["input_ids"], mean, args)


def tokens_only(dataset: AnyDataset) -> AnyDataset:
    """Return the records with `input_ids` and `labels` only, so that records of several sources can be mixed.

    Args:
        dataset (`Dataset` or `IterableDataset`): records with `input_ids`.
    """
    with_labels = (
        dataset
        if "labels" in columns_of(dataset)
        else dataset.map(lambda one: {"labels": one["input_ids"]})
    )
    types = List(Value("int64"))
    return with_labels.select_columns(["input_ids", "labels"]).cast(
        Features(input_ids=types, labels=types)
    )


def text_only(dataset: AnyDataset, args: SourceArguments, *, split: str) -> AnyDataset:
    """Return the records with the column of text only, named `text`, so that records of several sources can be mixed.

    Args:
        dataset (`Dataset` or `IterableDataset`): the raw records.
        args (`SourceArguments`): the names for error messages.
        split (`str`): `train` or `validation`.

    Raises:
        DataError: the records cannot be read or have no text column.
    """
    with errors_name_source(args, split):
        column = _text_column(dataset, _sample(dataset), source=source_name(args, split))
        selected = dataset.select_columns([column])
        selected = selected if column == "text" else selected.rename_column(column, "text")
        return selected.cast_column("text", Value("string"))


def pack_tokens(
    dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, *, split: str
) -> AnyDataset:
    """Pack documents that are tokenised already into rows, those of token files without a copy where none is cut.

    Args:
        dataset (`Dataset` or `IterableDataset`): records with `input_ids`; `labels` are those, if there are none.
        tokenizer (`PreTrainedTokenizerBase`): has the token for padding, and its size is compared with the tokens.
        args (`DataArguments`): how to pack, and the names for error messages.
        split (`str`): `train` or `validation`.

    Returns:
        The rows. Each has the columns of `pack_rows`.

    Raises:
        DataError: tokens are not in the vocabulary.
    """
    is_in_files = is_mapped(dataset)
    with errors_name_source(args, split):
        sampled = (max(record["input_ids"], default=0) for record in _sample(dataset))
        largest = largest_token(dataset) if is_in_files else max(sampled, default=0)
    check_vocabulary(largest, tokenizer, source=source_name(args, split))
    if is_in_files and args.packing == "concat" and not args.document_attention:
        return mapped_rows(dataset, args.block_size)
    return pack_documents(dataset, tokenizer, args, split=split)


def pack_documents(
    documents: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments, *, split: str
) -> AnyDataset:
    """Pack documents into rows.

    Args:
        documents (`Dataset` or `IterableDataset`): records with `input_ids`, and `labels` if they differ. Those longer
            than `args.block_size` are cut into several.
        tokenizer (`PreTrainedTokenizerBase`): has the token for padding.
        args (`DataArguments`): how to pack, and the names for error messages.
        split (`str`): `train` or `validation`.

    Returns:
        The rows. Each has the columns of `pack_rows`. A streamed dataset is packed when it is read.
    """
    options = _row_options(tokenizer, args)

    def pack_batch(batch: Rows) -> Rows:
        labels = batch.get("labels", batch["input_ids"])
        return pack_rows(zip(batch["input_ids"], labels, strict=True), **options)

    with errors_name_source(args, split):
        sample = _sample(documents)
        lengths = [len(record["input_ids"]) for record in sample]
        columns = documents.column_names or list(sample[0])
        return _map(documents, pack_batch, columns, sum(lengths) / max(len(lengths), 1), args)


def _row_options(tokenizer: PreTrainedTokenizerBase, args: DataArguments) -> dict[str, Any]:
    return {
        "packing": args.packing,
        "block_size": args.block_size,
        "cut": args.document_attention,
        "pad": padding_token(tokenizer),
    }


def _map(
    dataset: AnyDataset, function: Any, columns: list[str], tokens: float, args: DataArguments
) -> AnyDataset:
    """Pack batches of so many records, of `tokens` tokens on average, that the loss at their ends is small.

    One process packs, so that the rows do not depend on the number of processes.
    """
    wanted = max(_BATCH_TOKENS, _BATCH_BLOCKS * args.block_size)
    options: dict[str, Any] = {"batched": True, "batch_size": math.ceil(wanted / max(tokens, 1))}
    if isinstance(dataset, Dataset):
        options["desc"] = f"Packing into {args.block_size} tokens"
    return dataset.map(function, remove_columns=columns, **options)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token of padding: the tokenizer's own, else its end-of-text token, else 0; its label is ignored.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer of the model.
    """
    return next(
        (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None),
        0,
    )


# --- documents -> rows -----------------------------------------------------------------------------------------------


def pack_rows(
    documents: Iterable[Document], *, packing: str, block_size: int, cut: bool, pad: int
) -> Rows:
    """Pack a batch of documents into rows.

    Args:
        documents (`Iterable[Document]`): tokens and labels of each document.
        packing (`str`): `none`, `concat` or `bestfit`.
        block_size (`int`): the length of a row in tokens; with `none`, the greatest length.
        cut (`bool`): whether attention is cut at the boundaries of documents.
        pad (`int`): the token of padding.

    Returns:
        `input_ids` and `labels`; also `position_ids` with `cut`; else `attention_mask`, unless there is no padding.
    """
    rows: list[list[Document]]
    if packing == "concat":
        rows = _concatenate(documents, block_size)
    else:
        pieces = [piece for document in documents for piece in _pieces(document, block_size)]
        if packing == "none":
            rows = [[piece] for piece in pieces]
        else:
            found = best_fit([len(tokens) for tokens, _ in pieces], block_size)
            rows = [[pieces[number] for number in row] for row in found]
    has_mask = not cut and packing != "concat"
    length = block_size if packing == "bestfit" else 0
    columns: Rows = {"input_ids": [], "labels": []}
    if cut:
        columns["position_ids"] = []
    if has_mask:
        columns["attention_mask"] = []
    for row in rows:
        used = sum(len(tokens) for tokens, _ in row)
        padding = max(length - used, 0)
        labels = [labels for _, labels in row]
        # Across a cut nothing predicts the first token of a document.
        if cut:
            labels = [[IGNORED, *of_document[1:]] for of_document in labels]
        columns["input_ids"].append([*chain(*(tokens for tokens, _ in row)), *[pad] * padding])
        columns["labels"].append([*chain(*labels), *[IGNORED] * padding])
        if cut:
            positions = chain(*(range(len(tokens)) for tokens, _ in row))
            columns["position_ids"].append([*positions, *[0] * padding])
        if has_mask:
            columns["attention_mask"].append([1] * used + [0] * padding)
    return columns


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Assign documents to rows by best-fit decreasing: the longest first, each to the fullest row that has space.

    Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830.

    Args:
        lengths (`Sequence[int]`): tokens of each document, at most `size`.
        size (`int`): tokens of a row.

    Returns:
        The numbers of the documents in each row, ascending; rows are in the order of their first documents.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # free tokens and number of each row that has any, ascending
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fullest = bisect_left(spaces, (lengths[number], 0))
        if fullest == len(spaces):
            rows.append([])
            spaces.append((size, len(rows) - 1))  # no free space is greater
        space, row = spaces.pop(fullest)
        rows[row].append(number)
        if space > lengths[number]:
            insort(spaces, (space - lengths[number], row))
    return sorted(sorted(row) for row in rows)


def _pieces(document: Document, size: int) -> list[Document]:
    """Cut a document into pieces of at most `size` tokens; one token alone is left out, as nothing predicts it."""
    tokens, labels = document
    starts = range(0, len(tokens) - 1, size) if size > 1 else range(len(tokens))
    return [(tokens[start : start + size], labels[start : start + size]) for start in starts]


def _concatenate(documents: Iterable[Document], size: int) -> list[list[Document]]:
    """Cut documents at the ends of full rows; what remains at the end, less than a row, is left out."""
    rows: list[list[Document]] = []
    row: list[Document] = []
    space = size
    for tokens, labels in documents:
        start = 0
        while start < len(tokens):
            piece = slice(start, start + space)
            row.append((tokens[piece], labels[piece]))
            space -= len(tokens[piece])
            start = piece.stop
            if space == 0:
                rows.append(row)
                row = []
                space = size
    return rows


class RowCollator:
    """Makes batches of rows. Where rows differ in length (`--packing none`), they are padded to the longest.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): has the token for padding.
        add_positions (`bool`): whether batches have `position_ids` too. Ranks that share a sequence need them: each
            must know which part of it it holds.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, add_positions: bool = False) -> None:
        self._fill = {"input_ids": padding_token(tokenizer), "labels": IGNORED}
        self._add_positions = add_positions

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the batch.

        Args:
            rows (`Sequence[dict]`): rows with the same columns, each a list or a tensor of numbers.

        Returns:
            A tensor (rows, sequence) for each column.
        """
        batch = {
            name: pad_sequence(
                [torch.as_tensor(row[name]) for row in rows],
                batch_first=True,
                padding_value=self._fill.get(name, 0),
            )
            for name in rows[0]
        }
        if self._add_positions:
            count, length = batch["input_ids"].shape
            batch["position_ids"] = torch.arange(length).expand(count, -1).contiguous()
        return batch


# --- text -> documents -----------------------------------------------------------------------------------------------


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
    return [
        dataset[number]
        for number in range(0, len(dataset), max(1, len(dataset) // _SAMPLE_RECORDS))
    ]


def _text_column(dataset: AnyDataset, sample: list[dict[str, Any]], *, source: str) -> str:
    """Return the name of the column of text: `text`, or the only column of strings."""
    if not sample:
        raise DataError(f"{source} has no records")
    columns = dataset.column_names or list(sample[0])
    features = dataset.features or {}

    def is_text(name: str) -> bool:
        """A stream may not say what is in its columns: then a few records do."""
        if name not in features:
            return all(isinstance(record[name], str | None) for record in sample)
        return getattr(features[name], "dtype", None) in _STRINGS

    # A table without `text` is taken only where there is no choice: a wrong column would be trained on silently.
    strings: list[str] = [name for name in columns if is_text(name)]
    if "text" in columns and "text" not in strings:
        raise DataError(
            f"{source}: not every 'text' is a string: convert the others or leave them out"
        )
    if "text" in columns:
        return "text"
    if len(strings) == 1:
        logger.info("reads the column '%s' of %s", strings[0], source.partition(" ")[2])
        return strings[0]
    named = ", ".join(f"'{name}'" for name in columns)
    if {"chosen", "rejected"} <= set(columns):
        raise DataError(
            f"{source} has preferences ('chosen' and 'rejected'): train on them with recipes/dpo/train.py"
        )
    raise DataError(
        f"{source} has no column 'text', only {shorten(named)}: rename the one to train on to 'text', 'messages' or "
        "'conversations', or two to 'prompt' and 'completion'"
    )
