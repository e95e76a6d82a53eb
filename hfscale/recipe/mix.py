"""Several sources of records, mixed by weight (`--data_mix FILE`).

The file is a YAML list with one item per source:

    - {train_file: chat.jsonl, weight: 2}
    - {dataset_name: HuggingFaceH4/ultrachat_200k, split: train_sft, weight: 1}
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from datasets import Dataset, IterableDataset, interleave_datasets

from hfscale.core.flags import nearest, read_yaml
from hfscale.core.logging import get_logger
from hfscale.core.spelling import spelled
from hfscale.errors import ConfigFileError, DataError
from hfscale.recipe.arguments import SourceArguments

logger = get_logger(__name__)

SOURCE_FLAGS = {
    "dataset_name": "dataset_name",
    "config": "dataset_config_name",
    "split": "dataset_train_split",
    "train_file": "train_file",
}
"""Key of a source -> flag that it stands for."""

_Arguments = TypeVar("_Arguments", bound=SourceArguments)


def read_mix(args: _Arguments) -> list[tuple[float, _Arguments]]:
    """Read the sources of `--data_mix`.

    Args:
        args (`SourceArguments`): names the file.

    Returns:
        `list`: for each source the share of the records that come from it, and `args` with this source only.

    Raises:
        ConfigFileError: the file is missing or not YAML, or a source has an unknown key, no weight or no name.
        DataError: a source is a .txt file.
    """
    flag = spelled("data_mix", args.data_mix)
    items = read_yaml(str(args.data_mix), spelled("data_mix"))
    if not isinstance(items, list) or not items:
        raise ConfigFileError(
            f"{flag} is not a list: write one line '- {{train_file: FILE, weight: 1}}' per source"
        )
    found = [
        _read_source(item, f"{flag}, source {number}", args)
        for number, item in enumerate(items, start=1)
    ]
    total = sum(weight for weight, _ in found)
    return [(weight / total, source) for weight, source in found]


def _read_source(item: Any, where: str, args: _Arguments) -> tuple[float, _Arguments]:
    if not isinstance(item, dict):
        raise ConfigFileError(f"{where} is '{item}': write it as {{train_file: FILE, weight: 1}}")
    for key in item:
        if key not in (*SOURCE_FLAGS, "weight"):
            close = nearest(str(key), [*SOURCE_FLAGS, "weight"])
            fix = close or f": the keys are {', '.join(SOURCE_FLAGS)} and weight"
            raise ConfigFileError(f"{where} has an unknown key '{key}'{fix}")
    weight = item.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigFileError(f"{where} has the weight {weight}: give a number greater than 0")
    if ("train_file" in item) == ("dataset_name" in item):
        raise ConfigFileError(f"{where} must have either train_file or dataset_name")
    if "train_file" in item and {"config", "split"} & item.keys():
        raise ConfigFileError(
            f"{where}: config and split are for a dataset_name, not for a train_file"
        )
    for key in SOURCE_FLAGS:
        if key in item and not isinstance(item[key], str):
            raise ConfigFileError(f"{where}: {key} is {item[key]}: it must be text")
    if Path(item.get("train_file", "")).suffix.lower() == ".txt":
        raise DataError(
            f"{where}: {item['train_file']} is one text in lines and has no records to mix: make it .jsonl"
        )
    flags: dict[str, Any] = dict.fromkeys(("dataset_name", "dataset_config_name", "train_file"))
    flags["dataset_train_split"] = "train"
    flags |= {SOURCE_FLAGS[key]: value for key, value in item.items() if key in SOURCE_FLAGS}
    percentage = 0 if args.validation_file else args.validation_split_percentage
    # The checks of the flags see one source, as if its flags had been given.
    source = replace(
        args, **flags, data_mix=None, validation_file=None, validation_split_percentage=percentage
    )
    source.named_by = where
    return float(weight), source


def mix(parts: Sequence[Any], shares: Sequence[float], names: Sequence[str], *, seed: int) -> Any:
    """Mix records at random by the shares, until each record of every source was taken at least once.

    The sources that end earlier begin again, so nothing is left out. How often each is read is logged.

    Args:
        parts (`Sequence`): the records of each source, all with the same columns.
        shares (`Sequence[float]`): the share of each; their sum is 1.
        names (`Sequence[str]`): the name of each, for log lines and errors.
        seed (`int`): decides the order.

    Returns:
        `Dataset` or `IterableDataset`: the mixed records. The order depends on the sources, shares and seed only.

    Raises:
        DataError: a source has no records, or other columns than the first one.
    """
    columns = [_columns(part) for part in parts]
    for name, found in zip(names, columns, strict=True):
        if not found:
            raise DataError(f"{name} has no records")
        if found != columns[0]:
            raise DataError(
                f"{name} has the columns {', '.join(sorted(found))}, and {names[0]} has "
                f"{', '.join(sorted(columns[0]))}: sources that are mixed must have the same columns"
            )
    mixed = interleave_datasets(
        list(parts), probabilities=list(shares), seed=seed, stopping_strategy="all_exhausted"
    )
    for part, share, name in zip(parts, shares, names, strict=True):
        size = ""
        if isinstance(part, Dataset):
            size = f": {len(part):,} records, each taken {share * len(mixed) / len(part):.1f} times an epoch"
        logger.info("%.1f%% of the records are of %s%s", 100 * share, name.partition(": ")[2], size)
    return mixed


def _columns(part: Dataset | IterableDataset) -> set[str]:
    return set(next(iter(part), {}))
