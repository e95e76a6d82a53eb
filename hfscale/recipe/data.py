"""Text in, packed sequences out: from the hub, from files or from the embedded corpus."""

import codecs
import errno
import glob
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hfscale.errors import DataError, HfScaleError, StorageError
from hfscale.recipe import corpus
from hfscale.recipe.arguments import DataArguments
from hfscale.utils import disk_errors
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

AnyDataset = Dataset | IterableDataset
Splits = dict[str, AnyDataset]

_BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""The builder of `datasets` for each file name extension."""
_BUILDER_OPTIONS: dict[str, dict[str, Any]] = {"text": {"keep_linebreaks": True, "encoding": "utf-8-sig"}}
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
            f"{_source_name(args, 'train')} is shorter than one block of {args.block_size} tokens: give more text or "
            "lower --block_size"
        )
    if evaluation is not None and _is_empty(evaluation, args, "validation"):
        logger.info("no evaluation: its text is shorter than one block of %d tokens", args.block_size)
        evaluation = None
    return _first(train, args.max_train_samples), _first(evaluation, args.max_eval_samples)


def load_splits(args: DataArguments, *, seed: int) -> Splits:
    """Load the raw records of the text.

    Args:
        args (`DataArguments`): the source of the text; without one, the embedded text is loaded.
        seed (`int`): chooses the evaluation records of a source that has none of its own.

    Returns:
        `dict`: the records of `train`, and those of `validation` if the source has them or is large enough to be
        split.

    Raises:
        DataError: a file or a dataset is missing, unreadable or not in the format of its extension.
        StorageError: the cache of `datasets` cannot be written.
    """
    if args.train_file:
        splits: Splits = {"train": _load_file(args, "train")}
    elif args.dataset_name:
        splits = _load_dataset(args)
    else:
        return _load_corpus(args)
    if args.validation_file:
        splits["validation"] = _load_file(args, "validation")
    elif "validation" not in splits and args.validation_split_percentage:
        splits |= _split(splits["train"], args, seed)
    return splits


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
    with _errors_name_source(args, split):
        sample = _sample(dataset)
        column = _text_column(dataset, sample, source=_source_name(args, split))
        # `datasets` hashes the function's closure into the cache's name: keep it to values that change the result.
        block_size, is_continuous = args.block_size, _is_continuous_text(args, split)
        begin, end = ([], []) if is_continuous else _document_marks(tokenizer)

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


def _document_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens before and after each document, the same as those that the model gets in use."""
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return (
        [tokenizer.bos_token_id] if adds_bos else [],
        [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
    )


def _load_corpus(args: DataArguments) -> Splits:
    """Load the standard library's source files through the cache of `datasets`, whose key depends on the files."""
    splits: Splits = {}
    for split in ("train", "validation"):
        with _errors_name_source(args, split):
            splits[split] = Dataset.from_generator(
                corpus.read_sources, gen_kwargs={"split": split}, fingerprint=f"{corpus.fingerprint()}-{split}"
            )
    return splits


def _load_file(args: DataArguments, split: str) -> AnyDataset:
    path = Path(_file_of(args, split) or "")
    source = _source_name(args, split)
    builder = _BUILDERS.get(path.suffix.lower())
    if not path.exists():
        raise DataError(f"{source} does not exist")
    if not path.is_file():
        raise DataError(f"{source} is not a file: name one, or give a folder to --dataset_name")
    if builder is None:
        raise DataError(f"{source} ends in none of {', '.join(_BUILDERS)}: rename or convert it")
    if path.stat().st_size == 0:
        raise DataError(f"{source} is empty")
    files = {split: glob.escape(str(path))}
    with _errors_name_source(args, split):
        return datasets.load_dataset(
            builder, data_files=files, split=split, streaming=args.streaming, **_BUILDER_OPTIONS.get(builder, {})
        )


def _load_dataset(args: DataArguments) -> Splits:
    with _errors_name_source(args, "train"):
        loaded = datasets.load_dataset(args.dataset_name, name=args.dataset_config_name, streaming=args.streaming)
    if "train" not in loaded:
        raise DataError(f"{_source_name(args, 'train')} has no split 'train', only {', '.join(loaded)}")
    return {split: loaded[split] for split in ("train", "validation") if split in loaded}


def _split(train: AnyDataset, args: DataArguments, seed: int) -> Splits:
    """Take a share of the records for evaluation: random ones, or the end of a continuous text."""
    share = args.validation_split_percentage
    if isinstance(train, IterableDataset):
        logger.info("no evaluation: a streamed text is not split; give --validation_file")
        return {}
    count = len(train) * share // 100
    if count == 0:
        logger.info("no evaluation: %d%% of %d records is less than one; give --validation_file", share, len(train))
        return {}
    parts = train.train_test_split(test_size=count, seed=seed, shuffle=not _is_continuous_text(args, "train"))
    return {"train": parts["train"], "validation": parts["test"]}


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
    raise DataError(f"{source} has no column 'text', only {_shorten(named)}: rename the one to train on")


def _batch_size(sample: list[dict[str, Any]], column: str, block_size: int) -> int:
    """Return the number of records per batch, lines or books, with which the dropped remainders are small."""
    tokens = sum(len((record[column] or "").encode()) for record in sample) / len(sample) / _BYTES_PER_TOKEN
    return math.ceil(max(_BATCH_TOKENS, _BATCH_BLOCKS * block_size) / max(tokens, 1))


def _is_empty(dataset: AnyDataset, args: DataArguments, split: str) -> bool:
    with _errors_name_source(args, split):  # this is the first time that a stream is read
        return next(iter(dataset), None) is None


def _first(dataset: AnyDataset | None, count: int | None) -> AnyDataset | None:
    return dataset if dataset is None or count is None else dataset.take(count)


# The source of a text, and the one line that names it if it cannot be read.


def _file_of(args: DataArguments, split: str) -> str | None:
    """Return the file from which a split is read, None if it is not read from a file."""
    return (args.validation_file if split == "validation" else None) or args.train_file


def _source_name(args: DataArguments, split: str) -> str:
    """Return the source of a split's text, as the user named it."""
    if split == "validation" and args.validation_file:
        return f"--validation_file {args.validation_file}"
    if args.train_file:
        return f"--train_file {args.train_file}"
    return f"--dataset_name {args.dataset_name}" if args.dataset_name else "the embedded text"


def _is_continuous_text(args: DataArguments, split: str) -> bool:
    """Return whether a split is one text in lines instead of one record per document."""
    return Path(_file_of(args, split) or "").suffix.lower() == ".txt"


@contextmanager
def _errors_name_source(args: DataArguments, split: str) -> Iterator[None]:
    """Turn what `datasets` raises about a split's text into one line that names the text."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs a traceback before it raises
    try:
        yield
    except HfScaleError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _explain(_root_cause(error), args, split) from error
    finally:
        datasets.logging.set_verbosity(level)


def _explain(cause: BaseException, args: DataArguments, split: str) -> HfScaleError:
    if isinstance(cause, OSError) and cause.errno in (*disk_errors.FULL, errno.EROFS):
        return StorageError(
            f"the cache {datasets.config.HF_DATASETS_CACHE} cannot be written: {cause.strerror}: make room, or set "
            "HF_DATASETS_CACHE to a folder that has it"
        )
    source = _source_name(args, split)
    file = _file_of(args, split)
    reason = _shorten(" ".join(str(cause).split()).rstrip("."))
    if "corresponds to no data" in reason:
        return DataError(f"{source} has no records")
    if file is None:
        return DataError(f"{source} cannot be loaded: {type(cause).__name__}: {reason}")
    builder = _BUILDERS[Path(file).suffix.lower()]
    fault = _utf8_fault(Path(file)) if builder != "parquet" else None
    if fault:
        return DataError(f"{source} is not UTF-8 text: {fault}")
    return DataError(f"{source} cannot be read as {builder}: {reason}: fix it, or rename it to the format that it has")


def _utf8_fault(path: Path) -> str | None:
    """Describe the first byte of a text file that is not UTF-8 and how to fix it; None if the file is UTF-8."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte {offset + error.start} is 0x{line[error.start]:02x}"
                if offset == 0 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    return f"{byte}: convert it with iconv -f UTF-16 -t UTF-8"
                if b"\0" in line:
                    return f"{byte}, in binary data: is it in another format than its extension says?"
                return f"{byte}: convert it, for instance with iconv -f LATIN1 -t UTF-8"
            offset += len(line)
    return None


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _shorten(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
