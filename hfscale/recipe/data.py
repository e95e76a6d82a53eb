"""Text in, packed sequences out: from the hub, from files or from the embedded corpus."""

import glob
import math
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hfscale.errors import DataError
from hfscale.recipe import corpus
from hfscale.recipe.arguments import DataArguments
from hfscale.recipe.text_source import BUILDERS, file_of, is_running_text, reading, shorten, source_of
from hfscale.utils.logging import get_logger

logger = get_logger(__name__)

AnyDataset = Dataset | IterableDataset
Splits = dict[str, AnyDataset]

_BUILDER_OPTIONS: dict[str, dict[str, Any]] = {"text": {"keep_linebreaks": True, "encoding": "utf-8-sig"}}
_STRINGS = ("string", "large_string")

_BATCH_TOKENS, _BATCH_BLOCKS = 2**20, 64  # about so much is packed in one go, whichever is more
_BYTES_PER_TOKEN = 4  # for that estimate only
_SAMPLE = 32  # records that it looks at
_PIECE_CHARACTERS = 2**14  # of a running text, tokenised as one


def load_packed_datasets(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> tuple[AnyDataset, AnyDataset | None]:
    """The training sequences, and the evaluation sequences where there are any, each of exactly `block_size` tokens.

    Documents are tokenised, ended with the tokenizer's end-of-text token (and begun with its beginning-of-text token
    where it puts one itself, as those of Llama 3 and Gemma do), laid end to end and cut: no padding. Empty documents
    are left out. Lines of a .txt file are one running text, with no mark between them.

    Packing goes by batches of about a million tokens (64 blocks, where those are more); what is left over of each,
    less than one block, is dropped. Call it on the main process first; the others then find the result in the cache.

    Args:
        seed (`int`): for the split of a text that has no evaluation part of its own.

    Raises:
        DataError: a file is missing, unreadable, not of the kind its name says, has no text column or too little text.
        StorageError: the cache of `datasets` cannot be written.
    """
    packed = {
        split: pack(records, tokenizer, args, split=split) for split, records in load_splits(args, seed=seed).items()
    }
    train, evaluation = packed["train"], packed.get("validation")
    if _is_empty(train, args, "train"):
        raise DataError(
            f"{source_of(args, 'train')} is shorter than one block of {args.block_size} tokens: give more text or "
            "lower --block_size"
        )
    if evaluation is not None and _is_empty(evaluation, args, "validation"):
        logger.info("no evaluation: its text is shorter than one block of %d tokens", args.block_size)
        evaluation = None
    return _first(train, args.max_train_samples), _first(evaluation, args.max_eval_samples)


def load_splits(args: DataArguments, *, seed: int) -> Splits:
    """The raw records: `train`, and `validation` where the source has one or can spare a part."""
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
    """Tokenise the records of a split and pack them into sequences of `block_size` tokens, with their labels."""
    with reading(args, split):
        sample = _sample(dataset)
        column = _text_column(dataset, sample, source=source_of(args, split))
        # `datasets` hashes what the function holds into the cache's name: plain values, no flags beside the point.
        block_size, is_running = args.block_size, is_running_text(args, split)
        begin, end = ([], []) if is_running else _document_marks(tokenizer)

        def tokenize_and_pack(batch: dict[str, list[str | None]]) -> dict[str, list[list[int]]]:
            texts = [text or "" for text in batch[column]]
            texts = _join_lines(texts) if is_running else [text for text in texts if text.strip()]
            tokens: list[int] = []
            for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []:
                tokens += begin + ids + end
            whole = len(tokens) // block_size * block_size
            blocks = [tokens[start : start + block_size] for start in range(0, whole, block_size)]
            return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

        options: dict[str, Any] = {"batched": True, "batch_size": _batch_size(sample, column, block_size)}
        if isinstance(dataset, Dataset):
            options |= {"num_proc": args.preprocessing_num_workers, "desc": f"Packing into {block_size} tokens"}
        return dataset.map(tokenize_and_pack, remove_columns=dataset.column_names or list(sample[0]), **options)


def _document_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What stands before and after each document: the model should see in training what it will see in use."""
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return (
        [tokenizer.bos_token_id] if adds_bos else [],
        [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
    )


def _load_corpus(args: DataArguments) -> Splits:
    """The standard library, through `datasets`' cache, keyed by its content."""
    splits: Splits = {}
    for split in ("train", "validation"):
        with reading(args, split):
            splits[split] = Dataset.from_generator(
                corpus.read_sources, gen_kwargs={"split": split}, fingerprint=f"{corpus.fingerprint()}-{split}"
            )
    return splits


def _load_file(args: DataArguments, split: str) -> AnyDataset:
    path = Path(file_of(args, split) or "")
    source = source_of(args, split)
    builder = BUILDERS.get(path.suffix.lower())
    if not path.exists():
        raise DataError(f"{source} does not exist")
    if not path.is_file():
        raise DataError(f"{source} is not a file: name one, or give a folder to --dataset_name")
    if builder is None:
        raise DataError(f"{source} ends in none of {', '.join(BUILDERS)}: rename or convert it")
    if path.stat().st_size == 0:
        raise DataError(f"{source} is empty")
    files = {split: glob.escape(str(path))}
    with reading(args, split):
        return datasets.load_dataset(
            builder, data_files=files, split=split, streaming=args.streaming, **_BUILDER_OPTIONS.get(builder, {})
        )


def _load_dataset(args: DataArguments) -> Splits:
    with reading(args, "train"):
        loaded = datasets.load_dataset(args.dataset_name, name=args.dataset_config_name, streaming=args.streaming)
    if "train" not in loaded:
        raise DataError(f"{source_of(args, 'train')} has no split 'train' but {', '.join(loaded)}")
    return {split: loaded[split] for split in ("train", "validation") if split in loaded}


def _split(train: AnyDataset, args: DataArguments, seed: int) -> Splits:
    """Set a share of the records apart: any of them, or the end of a running text, whose order means something."""
    share = args.validation_split_percentage
    if isinstance(train, IterableDataset):
        logger.info("no evaluation: a streamed text is not split; give --validation_file")
        return {}
    count = len(train) * share // 100
    if count == 0:
        logger.info("no evaluation: %d%% of %d records is less than one; give --validation_file", share, len(train))
        return {}
    parts = train.train_test_split(test_size=count, seed=seed, shuffle=not is_running_text(args, "train"))
    return {"train": parts["train"], "validation": parts["test"]}


def _join_lines(lines: list[str]) -> list[str]:
    """The same text in pieces of some length: tokens may span line ends, and many pieces are tokenised in parallel."""
    pieces: list[str] = []
    start, characters = 0, 0
    for number, line in enumerate(lines, start=1):
        characters += len(line)
        if characters >= _PIECE_CHARACTERS or number == len(lines):
            pieces.append("".join(lines[start:number]))
            start, characters = number, 0
    return pieces


def _sample(dataset: AnyDataset) -> list[dict[str, Any]]:
    """A few records from all over a prepared dataset, or from the beginning of a stream."""
    if isinstance(dataset, IterableDataset):
        return list(dataset.take(_SAMPLE))
    return [dataset[number] for number in range(0, len(dataset), max(1, len(dataset) // _SAMPLE))]


def _text_column(dataset: AnyDataset, sample: list[dict[str, Any]], *, source: str) -> str:
    """`text`, or the only column of strings."""
    if not sample:
        raise DataError(f"{source} holds no records")
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
    raise DataError(f"{source} has no column 'text' but {shorten(named)}: rename the one to train on")


def _batch_size(sample: list[dict[str, Any]], column: str, block_size: int) -> int:
    """Records per batch, be they lines or books, so that the rest each batch drops is small against it."""
    tokens = sum(len((record[column] or "").encode()) for record in sample) / len(sample) / _BYTES_PER_TOKEN
    return math.ceil(max(_BATCH_TOKENS, _BATCH_BLOCKS * block_size) / max(tokens, 1))


def _is_empty(dataset: AnyDataset, args: DataArguments, split: str) -> bool:
    with reading(args, split):  # a stream is read here for the first time
        return next(iter(dataset), None) is None


def _first(dataset: AnyDataset | None, count: int | None) -> AnyDataset | None:
    return dataset if dataset is None or count is None else dataset.take(count)
