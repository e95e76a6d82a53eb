"""Data that is tokenised already: the token files of datatrove, and records with a column `input_ids`.

datatrove writes `NAME.ds`, the tokens of all documents as little-endian integers of 2 or 4 bytes; `NAME.ds.index`, the
number of tokens up to the end of each document as 64-bit integers; and `NAME.ds.metadata`, whose first line is
`tokenizer|bytes per token` (`datatrove.pipeline.tokens.DocumentTokenizer`, version 0.10.1). The files are mapped into
memory: neither the documents nor rows that are cut from all of them are copied.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
import xxhash
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.core.text_files import bounded_lines
from hfscale.errors import DataError, UsageError

logger = get_logger(__name__)

SUFFIX = ".ds"
"""The file name extension of datatrove's token files."""
COLUMN = "input_ids"
"""The column of records that are tokenised already."""
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_CHECKED_TOKENS = 2**24
"""Tokens at the beginning of each file among which `largest_token` looks."""
_HASHED_BYTES = 2**20


def token_files(folder: Path) -> list[Path]:
    """Return the token files of a folder and its subfolders, by their names.

    Args:
        folder (`Path`): such as the output of datatrove's tokeniser, with one file for each of its tasks.
    """
    return sorted(folder.rglob(f"*{SUFFIX}"))


def load_token_files(files: Sequence[Path], *, streaming: bool, source: str) -> Dataset:
    """Map token files as documents.

    Args:
        files (`Sequence[Path]`): the `.ds` files; at least one.
        streaming (`bool`): the flag `--streaming`, which does not fit.
        source (`str`): the flag and the value that name them, for errors.

    Returns:
        `Dataset`: one record with `input_ids` per document, in the order of the files.

    Raises:
        DataError: a file is incomplete, or two differ in their tokenizer.
        UsageError: they are to be streamed.
    """
    if streaming:
        given = f"{spelled('streaming')} is given with {source}"
        raise UsageError(f"{given}: token files are mapped, not loaded; leave it out")
    # The files name their tokenizer; tokens of another one would be other words to the model, without an error.
    headers = {path: _read_header(path, source) for path in files}
    if len(set(headers.values())) > 1:
        named = ", ".join(
            f"{path.name}: {name}, {size} bytes" for path, (name, size) in headers.items()
        )
        raise DataError(f"{source} has files of several tokenizers ({named}): give those of one")
    tokenizer, size = headers[files[0]]
    columns = [_documents(path, size, source) for path in files]
    column = pa.chunked_array([column for column in columns if len(column)] or columns[:1])
    total = sum(path.stat().st_size for path in files) // size
    logger.info(
        "reads %d tokens in %d documents of %d token file%s, tokenised with %s",
        total,
        len(column),
        len(files),
        "s" if len(files) > 1 else "",
        tokenizer,
    )
    return Dataset(InMemoryTable(pa.table({COLUMN: column})), fingerprint=_fingerprint(files))


def check_vocabulary(largest: int, tokenizer: PreTrainedTokenizerBase, *, source: str) -> None:
    """Check that tokens are those of the model's tokenizer, as far as their numbers tell.

    Args:
        largest (`int`): the largest token that was seen.
        tokenizer (`PreTrainedTokenizerBase`): the tokenizer of the model.
        source (`str`): the flag and the value that name the tokens, for the error.

    Raises:
        DataError: the token is not in the vocabulary.
    """
    if largest >= len(tokenizer):
        raise DataError(
            f"{source} has the token {largest}, and the tokenizer has {len(tokenizer)}: tokenise the text with the "
            "tokenizer of the model, or give --tokenizer_name"
        )


def largest_token(dataset: Dataset) -> int:
    """Return the largest token among the first 16 million of each file.

    Args:
        dataset (`Dataset`): documents for which `is_mapped` is true.
    """
    return max(int(tokens[:_CHECKED_TOKENS].to_numpy().max(initial=0)) for tokens in _flat(dataset))


def is_mapped(dataset: object) -> TypeGuard[Dataset]:
    """Return whether records are documents of token files, whose tokens need no copy.

    Args:
        dataset (`Dataset` or `IterableDataset`): any records.
    """
    if not isinstance(dataset, Dataset) or dataset.column_names != [COLUMN]:
        return False
    kind = dataset.data.schema.field(COLUMN).type
    return bool(pa.types.is_large_list(kind) and pa.types.is_unsigned_integer(kind.value_type))


def mapped_rows(dataset: Dataset, block_size: int) -> Dataset:
    """Cut mapped documents, one after the other, into rows, without a copy.

    What remains at the end of each file, less than a row, is left out.

    Args:
        dataset (`Dataset`): documents for which `is_mapped` is true.
        block_size (`int`): the number of tokens of a row.

    Returns:
        `Dataset`: rows with `input_ids` and `labels`, (block_size,) each.
    """
    rows = []
    for tokens in _flat(dataset):
        used = len(tokens) // block_size * block_size
        rows.append(pa.FixedSizeListArray.from_arrays(tokens[:used], block_size))
    column = pa.chunked_array(rows)
    key = xxhash.xxh3_64_hexdigest(f"{dataset._fingerprint} {block_size}".encode())
    return Dataset(InMemoryTable(pa.table({COLUMN: column, "labels": column})), fingerprint=key)


def _flat(dataset: Dataset) -> list[pa.Array]:
    """Return the tokens of each file, as they lie in it."""
    column = dataset.with_format("arrow")[:].column(COLUMN)
    return [chunk.flatten() for chunk in column.chunks]


def _read_header(path: Path, source: str) -> tuple[str, int]:
    """Return the name of the tokenizer and the bytes per token."""
    metadata = Path(f"{path}.metadata")
    if not metadata.is_file():
        raise DataError(
            f"{source}: {path.name} has no {metadata.name}, which tells the bytes per token: write it with "
            "DocumentTokenizer(save_final_metadata=True)"
        )
    try:
        first = next(bounded_lines(metadata, errors="replace"), "").rstrip("\r\n")
    except OSError as error:
        raise DataError(f"{source}: {metadata.name} cannot be read: {error.strerror}") from None
    name, _, size = first.rpartition("|")
    if size not in map(str, _DTYPES):
        raise DataError(
            f"{source}: {metadata.name} begins with '{first[:80]}', not with 'tokenizer|2' or 'tokenizer|4'"
        )
    if path.stat().st_size % int(size):
        raise DataError(
            f"{source}: {path.name} has {path.stat().st_size} bytes, not a multiple of {size}: is it whole?"
        )
    if Path(f"{path}.loss").exists():
        raise DataError(
            f"{source}: {path.name}.loss masks tokens, which is not supported: write the tokens with "
            "save_loss_metadata=False, or conversations as JSON"
        )
    return name, int(size)


def _documents(path: Path, size: int, source: str) -> pa.LargeListArray:
    count = path.stat().st_size // size
    index = Path(f"{path}.index")
    if not index.is_file():
        raise DataError(
            f"{source}: {path.name} has no {index.name}: write it with DocumentTokenizer(save_index=True)"
        )
    # It is not read as a whole if its last number is wrong
    documents = index.stat().st_size // 8
    skipped = 8 * max(documents - 1, 0)
    ends = np.fromfile(index, dtype="<u8", count=1, offset=skipped)
    if len(ends) and int(ends[0]) == count:
        ends = np.fromfile(index, dtype="<u8")
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), ends.astype(np.int64)])
    if offsets[-1] != count or (np.diff(offsets) < 0).any():
        raise DataError(
            f"{source}: {index.name} ends at token {offsets[-1]}, and {path.name} has {count}: was one of them cut?"
        )
    dtype = _DTYPES[size]
    tokens = np.memmap(path, dtype=dtype, mode="r") if count else np.zeros(0, dtype=dtype)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(tokens))


def _fingerprint(files: Sequence[Path]) -> str:
    """Return a hash of the documents' ends, of the sizes, and of the first and last MiB of each file."""
    found = xxhash.xxh3_64()
    for path in files:
        found.update(Path(f"{path}.index").read_bytes())
        found.update(str(path.stat().st_size).encode())
        with path.open("rb") as file:
            found.update(file.read(_HASHED_BYTES))
            file.seek(max(path.stat().st_size - _HASHED_BYTES, 0))
            found.update(file.read(_HASHED_BYTES))
    return found.hexdigest()
