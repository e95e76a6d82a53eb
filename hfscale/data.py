"""Text in, packed sequences out: from the hub, from files or from the embedded corpus."""

from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedTokenizerBase

from hfscale import corpus
from hfscale.arguments import DataArguments
from hfscale.errors import DataError
from hfscale.logs import get_logger

logger = get_logger(__name__)

_BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_TEXT_KINDS = (".txt", ".json", ".jsonl", ".csv")
AnyDataset = Dataset | IterableDataset
Splits = dict[str, AnyDataset]


def load_packed_datasets(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> tuple[AnyDataset, AnyDataset | None]:
    """The training sequences, and the evaluation sequences where there are any, each of exactly `block_size` tokens.

    Documents are tokenised, ended with the tokenizer's end-of-text token, laid end to end and cut: no padding. Lines
    of a .txt file are one running text, with no end between them. What is left over of 1,000 documents, less than one
    block, is dropped. Call it on the main process first; the others then find the result in the cache.

    Args:
        seed (`int`): for the split of a text that has no evaluation part of its own.

    Raises:
        DataError: a file is missing, unreadable, not of the kind its name says, has no text column or too little text.
    """
    splits = load_splits(args, seed=seed)
    train = pack(splits["train"], tokenizer, args)
    evaluation = pack(splits["validation"], tokenizer, args) if "validation" in splits else None
    if isinstance(train, Dataset) and len(train) == 0:
        raise DataError(f"the training text fills not one block of {args.block_size} tokens: lower --block_size")
    if isinstance(evaluation, Dataset) and len(evaluation) == 0:
        logger.info("no evaluation: its text fills not one block of %d tokens", args.block_size)
        evaluation = None
    return _first(train, args.max_train_samples), _first(evaluation, args.max_eval_samples)


def load_splits(args: DataArguments, *, seed: int) -> Splits:
    """The raw records: `train`, and `validation` where the source has one or can spare a part."""
    if args.train_file:
        splits = _load_files(args)
    elif args.dataset_name:
        splits = _load_dataset(args)
    else:
        return _load_corpus()
    if "train" not in splits:
        raise DataError(f"the dataset '{args.dataset_name}' has no split 'train' but {', '.join(splits)}")
    if "validation" not in splits and args.validation_split_percentage:
        train = splits["train"]
        if isinstance(train, Dataset) and len(train) > 1:
            parts = train.train_test_split(test_size=args.validation_split_percentage / 100, seed=seed)
            return {"train": parts["train"], "validation": parts["test"]}
        logger.info("no evaluation: a text that is streamed, or a single record, is not split; give --validation_file")
    return splits


def pack(dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, args: DataArguments) -> AnyDataset:
    """Tokenise a dataset of records and pack it into sequences of `block_size` tokens, with their labels."""
    column = _text_column(dataset)
    running_text = args.train_file is not None and Path(args.train_file).suffix.lower() == ".txt"
    end = [] if running_text or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokenize_and_pack(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        tokens: list[int] = []
        for ids in tokenizer([text or "" for text in batch[column]], add_special_tokens=False)["input_ids"]:
            tokens += ids + end
        whole = len(tokens) // args.block_size * args.block_size
        blocks = [tokens[start : start + args.block_size] for start in range(0, whole, args.block_size)]
        return {"input_ids": blocks, "labels": [list(block) for block in blocks]}

    options: dict[str, Any] = {"batched": True, "remove_columns": dataset.column_names}
    if isinstance(dataset, Dataset):
        # A dataset line may be a sentence or a book: small texts are packed in one go, lest each batch drop its rest.
        options |= {"num_proc": args.preprocessing_num_workers, "desc": f"Packing into {args.block_size} tokens"}
    return dataset.map(tokenize_and_pack, **options)


def _load_corpus() -> Splits:
    """The standard library, through `datasets`' cache, keyed by its content."""
    splits: Splits = {}
    for split in ("train", "validation"):
        splits[split] = Dataset.from_generator(
            corpus.read_sources, gen_kwargs={"split": split}, fingerprint=f"{corpus.fingerprint()}-{split}"
        )
    return splits


def _load_files(args: DataArguments) -> Splits:
    files = {"train": args.train_file, "validation": args.validation_file}
    kinds = {_builder(path) for path in files.values() if path}
    if len(kinds) > 1:
        raise DataError(f"{args.train_file} and {args.validation_file} are of two kinds: convert one of them")
    builder = kinds.pop()
    options = {"keep_linebreaks": True} if builder == "text" else {}
    data_files = {split: path for split, path in files.items() if path}
    return _load(builder, args, f"{args.train_file}", data_files=data_files, **options)


def _load_dataset(args: DataArguments) -> Splits:
    return _load(args.dataset_name, args, f"the dataset '{args.dataset_name}'", name=args.dataset_config_name)


def _load(path: str, args: DataArguments, what: str, **options: Any) -> Splits:
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs a traceback before it raises
    try:
        loaded = datasets.load_dataset(path, streaming=args.streaming, **options)
    except Exception as error:
        for file in (args.train_file, args.validation_file):
            if file:
                _check_utf8(Path(file))
        raise DataError(f"{what} cannot be read: {_root_cause(error)}") from error
    finally:
        datasets.logging.set_verbosity(level)
    assert isinstance(loaded, DatasetDict | IterableDatasetDict)  # no split was asked for
    return dict(loaded)


def _builder(path: str) -> str:
    file = Path(path)
    builder = _BUILDERS.get(file.suffix.lower())
    if builder is None:
        raise DataError(f"{path} ends in none of {', '.join(_BUILDERS)}: rename or convert it")
    if not file.is_file():
        raise DataError(f"{path} is not a file: check --train_file and --validation_file")
    if file.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return builder


def _check_utf8(path: Path) -> None:
    """Raise a DataError that names the first byte of a text file that is not UTF-8."""
    if path.suffix.lower() not in _TEXT_KINDS or not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for line in file:
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} is not UTF-8 text (byte {offset + error.start}): convert it, for instance with "
                    f"iconv -f LATIN1 -t UTF-8"
                ) from None
            offset += len(line)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _text_column(dataset: AnyDataset) -> str:
    """`text`, or the only column of strings."""
    columns = dataset.column_names or list(next(iter(dataset)))
    if "text" in columns:
        return "text"
    features = dataset.features
    strings = [name for name in columns if features is None or getattr(features[name], "dtype", "") == "string"]
    if len(strings) == 1:
        return strings[0]
    raise DataError(f"no column is named 'text' among {', '.join(columns)}: rename the one to train on")


def _first(dataset: AnyDataset | None, count: int | None) -> AnyDataset | None:
    if dataset is None or count is None:
        return dataset
    return dataset.take(count) if isinstance(dataset, IterableDataset) else dataset.select(range(min(count, len(dataset))))
