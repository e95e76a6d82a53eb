"""The raw records of a recipe: from the hub, from files or from the embedded corpus."""

import codecs
import errno
import glob
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from datasets import Dataset, IterableDataset

from hfscale.core import disk_errors
from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.errors import DataError, HealthError, HfScaleError, StorageError, UsageError
from hfscale.recipe import corpus
from hfscale.recipe.arguments import SourceArguments
from hfscale.recipe.cache import load_by_content
from hfscale.recipe.mix import mix, read_mix
from hfscale.recipe.token_files import SUFFIX, is_mapped, load_token_files, token_files

logger = get_logger(__name__)

AnyDataset: TypeAlias = Dataset | IterableDataset
Splits: TypeAlias = dict[str, AnyDataset]

HELD_OUT = "held_out"
"""The key of evaluation records that were taken from those of `train`: what is not evaluated of them is trained on."""

_BUILDERS = {
    ".txt": "text",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""The builder of `datasets` for each file name extension."""
_BUILDER_OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"keep_linebreaks": True, "encoding": "utf-8-sig"}
}


def load_splits(
    args: SourceArguments,
    *,
    seed: int,
    embedded: str = "text",
    convert: Callable[[AnyDataset, SourceArguments, str], AnyDataset] | None = None,
) -> Splits:
    """Load the raw records of the text.

    Args:
        args (`SourceArguments`): the source of the text; without one, embedded records are loaded.
        seed (`int`): chooses the evaluation records of a source that has none of its own.
        embedded (`str`): the kind of the embedded records, a key of `corpus.RECORDS`.
        convert (`Callable`, *optional*): converts the records of a split of one source, before evaluation records are
            taken from those of `train` and before sources are mixed.

    Returns:
        `dict`: the records of `train`, and those of `validation` if the source has them, or of `HELD_OUT` if it is
        large enough to be split.

    Raises:
        DataError: a file or a dataset is missing, unreadable or not in the format of its extension.
        StorageError: the cache of `datasets` cannot be written.
    """
    if args.data_mix:
        return _load_mix(args, seed=seed, convert=convert)
    if args.train_file:
        splits: Splits = {"train": _load_file(args, "train")}
    elif args.dataset_name:
        splits = _load_dataset(args)
    else:
        splits = _load_corpus(args, embedded)
    if args.validation_file:
        splits["validation"] = _load_file(args, "validation")
    if convert is not None:
        splits = {split: convert(records, args, split) for split, records in splits.items()}
    if "validation" not in splits and args.validation_split_percentage:
        splits |= _split(splits["train"], args, seed)
    return splits


def _load_mix(
    args: SourceArguments, *, seed: int, convert: Callable[..., AnyDataset] | None
) -> Splits:
    """Load and mix several sources; the evaluation records are those of all, as often as they are there."""
    sources = read_mix(args)
    parts = [load_splits(source, seed=seed, convert=convert) for _, source in sources]
    names = [source_name(source, "train") for _, source in sources]
    with errors_name_source(args, "train"):
        train = mix(
            [part["train"] for part in parts], [share for share, _ in sources], names, seed=seed
        )
    if args.validation_file:
        records = _load_file(args, "validation")
        return {
            "train": train,
            "validation": convert(records, args, "validation") if convert else records,
        }
    held_out: list[Any] = [
        part[split] for part in parts for split in ("validation", HELD_OUT) if split in part
    ]
    return {"train": train} | (
        {"validation": datasets.concatenate_datasets(held_out)} if held_out else {}
    )


def _load_corpus(args: SourceArguments, kind: str) -> Splits:
    """Load embedded records through the cache of `datasets`, whose key depends on the standard library's files."""
    splits: Splits = {}
    for split in ("train", "validation"):
        with errors_name_source(args, split):
            splits[split] = Dataset.from_generator(
                _embedded_records(kind),
                gen_kwargs={"split": split},
                fingerprint=f"{corpus.fingerprint()}-{kind}-{split}",
            )
    return splits


def _embedded_records(kind: str) -> Callable[[str], Iterator[dict[str, Any]]]:
    """Return the function that yields the embedded records of a kind and split."""
    if kind != "pictures":
        return corpus.RECORDS[kind]
    from hfscale.recipe import pictures  # it needs Pillow

    return pictures.picture_records


def _load_file(args: SourceArguments, split: str) -> AnyDataset:
    path = Path(file_of(args, split) or "")
    source = source_name(args, split)
    builder = _BUILDERS.get(path.suffix.lower())
    if not path.exists():
        looked = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"{source} does not exist{looked}: correct the path")
    if not path.is_file():
        raise DataError(f"{source} is not a file: name one, or give a folder to --dataset_name")
    if path.suffix == SUFFIX:
        return load_token_files([path], streaming=args.streaming, source=source)
    if builder is None:
        raise DataError(
            f"{source} ends in none of {', '.join((*_BUILDERS, SUFFIX))}: rename or convert it"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{source} is empty")
    options = _BUILDER_OPTIONS.get(builder, {})

    def load(cache: str | None) -> Any:
        files = {split: glob.escape(str(path))}
        return datasets.load_dataset(
            builder, data_files=files, streaming=cache is None, cache_dir=cache, **options
        )

    with errors_name_source(args, split):
        if args.streaming:
            return load(None)[split]
        return load_by_content([path], load, options=(builder, options, split), source=source)[
            split
        ]


def _load_dataset(args: SourceArguments) -> Splits:
    def load(cache: str | None) -> Any:
        name = args.dataset_config_name
        streaming = args.streaming
        return datasets.load_dataset(
            args.dataset_name, name=name, streaming=streaming, cache_dir=cache
        )

    folder = Path(args.dataset_name or "")
    if folder.is_dir() and (files := token_files(folder)):
        if args.dataset_config_name or args.dataset_train_split != "train":
            raise UsageError(
                f"{source_name(args, 'train')} has token files, which have no configuration and one split: leave out "
                "--dataset_config_name and --dataset_train_split"
            )
        return {
            "train": load_token_files(
                files, streaming=args.streaming, source=source_name(args, "train")
            )
        }
    with errors_name_source(args, "train"):
        if folder.is_dir() and not args.streaming:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            options = ([str(path.relative_to(folder)) for path in files], args.dataset_config_name)
            loaded = load_by_content(
                files, load, options=options, source=source_name(args, "train")
            )
        else:
            loaded = load(None)  # `datasets` knows the revision of a dataset of the hub
    name = args.dataset_train_split
    if name not in loaded:
        raise DataError(
            f"{source_name(args, 'train')} has no split '{name}', only {', '.join(loaded)}: give one of them as "
            "--dataset_train_split"
        )
    return {"train": loaded[name]} | (
        {"validation": loaded["validation"]} if "validation" in loaded else {}
    )


def _split(train: AnyDataset, args: SourceArguments, seed: int) -> Splits:
    """Take a share of the records for evaluation: random ones, or the end of a continuous text or of token files."""
    share = args.validation_split_percentage
    if isinstance(train, IterableDataset):
        logger.info("no evaluation: a streamed text is not split; give --validation_file")
        return {}
    count = len(train) * share // 100
    if count == 0:
        logger.info(
            "no evaluation: %d%% of %d records is less than one; give --validation_file",
            share,
            len(train),
        )
        return {}
    is_in_order = is_continuous_text(args, "train") or is_mapped(train)
    parts = train.train_test_split(test_size=count, seed=seed, shuffle=not is_in_order)
    return {"train": parts["train"], HELD_OUT: parts["test"]}


def limit_splits(
    splits: Splits, *, train: int | None, evaluation: int | None
) -> tuple[AnyDataset, AnyDataset | None]:
    """Return the training data and the evaluation data, not more than asked for.

    Args:
        splits (`dict`): what `load_splits` returned, or what was made of each of its splits.
        train (`int`, *optional*): the most that is trained on; None: everything.
        evaluation (`int`, *optional*): the most that is evaluated; None: everything. What was held out of the training
            data beyond it is trained on.
    """
    held_out = splits.get(HELD_OUT)
    trained: Any = splits["train"]
    if held_out is not None and evaluation is not None and not is_mapped(trained):
        rest: Any = held_out.skip(evaluation)
        trained = datasets.concatenate_datasets([trained, rest]) if len(rest) else trained
    evaluated = splits.get("validation", held_out)
    return _first(trained, train), None if evaluated is None else _first(evaluated, evaluation)


def _first(dataset: AnyDataset, count: int | None) -> AnyDataset:
    return dataset if count is None else dataset.take(count)


# The source of a text, and the one line that names it if it cannot be read.


def file_of(args: SourceArguments, split: str) -> str | None:
    """Return the file from which a split is read, None if it is not read from a file."""
    return (args.validation_file if split == "validation" else None) or args.train_file


def source_name(args: SourceArguments, split: str) -> str:
    """Return the flag and the value that name the records of a split, for error messages."""
    if split == "validation" and args.validation_file:
        return spelled("validation_file", args.validation_file)
    if args.named_by:
        return f"{args.named_by}: {args.train_file or args.dataset_name}"
    if args.data_mix:
        return spelled("data_mix", args.data_mix)
    if args.train_file:
        return spelled("train_file", args.train_file)
    return spelled("dataset_name", args.dataset_name) if args.dataset_name else "the embedded text"


def is_continuous_text(args: SourceArguments, split: str) -> bool:
    """Return whether a split is one text in lines instead of one record per document."""
    return Path(file_of(args, split) or "").suffix.lower() == ".txt"


def columns_of(dataset: AnyDataset) -> list[str]:
    """Return the names of the columns, of a stream those of its first record.

    Args:
        dataset (`Dataset` or `IterableDataset`): any records.
    """
    return dataset.column_names or list(next(iter(dataset), ()))


@contextmanager
def errors_name_source(args: SourceArguments, split: str) -> Iterator[None]:
    """Turn what `datasets` raises about a split's text into one line that names the text."""
    level = datasets.logging.get_verbosity()
    # It logs a traceback before it raises
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    except HfScaleError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _explain(_root_cause(error), args, split) from error
    except RuntimeError as error:
        if "abruptly died" not in str(error):
            raise
        raise HealthError(
            f"{source_name(args, split)}: a process that tokenises was killed, perhaps because memory is short: lower "
            "--preprocessing_num_workers"
        ) from None
    finally:
        datasets.logging.set_verbosity(level)


def _explain(cause: BaseException, args: SourceArguments, split: str) -> HfScaleError:
    if isinstance(cause, OSError) and cause.errno in (*disk_errors.FULL, errno.EROFS):
        return StorageError(
            f"the cache {datasets.config.HF_DATASETS_CACHE} cannot be written: {cause.strerror}: make room, or set "
            "HF_DATASETS_CACHE to a folder that has it"
        )
    source = source_name(args, split)
    file = file_of(args, split)
    reason = shorten(" ".join(str(cause).split()).rstrip("."))
    if "corresponds to no data" in reason:
        return DataError(f"{source} has no records")
    if file is None:
        return DataError(f"{source} cannot be loaded: {type(cause).__name__}: {reason}")
    builder = _BUILDERS[Path(file).suffix.lower()]
    fault = _utf8_fault(Path(file)) if builder != "parquet" else None
    if fault:
        return DataError(f"{source} is not UTF-8 text: {fault}")
    return DataError(
        f"{source} cannot be read as {builder}: {reason}: fix it, or rename it to the format that it has"
    )


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
                    return (
                        f"{byte}, in binary data: is it in another format than its extension says?"
                    )
                return f"{byte}: convert it, for instance with iconv -f LATIN1 -t UTF-8"
            offset += len(line)
    return None


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def shorten(text: str, most: int = 200) -> str:
    """Return a text of at most `most` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"
