"""Which rows a dataset has, and in which order: a hash of some of them for each place that holds them.

A split, a shuffle or a set without a seed gives every process other rows, or other numbers for the same labels.
Nothing fails then: ranks leave rows out and repeat others, and a resume goes on with the labels of another launch.
What is compared is read without a call of a user's function, which could draw random numbers or count its calls:
columns of `datasets`, and lists, arrays, tensors, tables of pandas and mappings from words to numbers that a dataset
holds.

Only whole numbers and texts are compared. Of a path or an address only the name counts, since a folder may have moved.
Places are compared one by one, so a place that is not known on one side is left out.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset
from transformers.trainer_utils import has_length

_SAMPLED_ROWS = 16
_SAMPLED_ITEMS = 256
"""Items of one row that count: a row may have a million tokens."""
_MAX_WORDS = 200_000
"""Words of a mapping; that of a larger one would take longer than a second."""
_MAX_DEPTH = 4
"""Datasets inside each other."""
_OF_BATCHES = "KL_"
"""What the columns begin with that TRL's KTO makes of the rows of a device's batch: another batch has others."""
SAMPLE = "sample"
"""The property of an identity for a list of rows, and what those of other places begin with."""
LABELS = "labels"
LABEL_NAMES = "label_names"


def row_hashes(dataset: Any) -> dict[str, str]:
    """Return a hash of some rows for each place of a dataset that holds rows, or numbers of words.

    Args:
        dataset (`Any`): a dataset with a length: of `datasets`, of torch, a list, or a dictionary of such datasets.

    Returns:
        `dict[str, str]`: a hash for each place, by name: `sample` for a list, `sample.label` for a column,
        `sample.dataset.indices` for an attribute of a dataset inside another one.
    """
    found = {}
    for place, content in _places(dataset, SAMPLE, 0):
        found[place] = _hash(content)
    return found


def labels_of(config: Any) -> dict[str, str]:
    """Return hashes of the names that a model's config gives to its labels: in their order, and as a set.

    Args:
        config (`Any`): the config of a model of transformers. One with the default names has no hashes.
    """
    names = getattr(config, "id2label", None)
    if not isinstance(names, Mapping) or len(names) < 2:
        return {}
    if not all(isinstance(number, int) for number in names):  # transformers makes them numbers
        return {}
    in_order = [str(names[number]) for number in sorted(names)]
    default = [f"LABEL_{number}" for number in range(len(names))]
    if in_order == default:
        return {}
    return {LABELS: _hash(in_order), LABEL_NAMES: _hash(sorted(in_order))}


def _places(dataset: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the places of a dataset, each with what is compared."""
    if depth > _MAX_DEPTH:
        return
    if _is_of_datasets(dataset):
        yield from _columns(dataset, path)
    elif isinstance(dataset, Mapping):
        for name, part in dataset.items():
            yield from _places(part, f"{path}.{name}", depth + 1)
    elif (rows := _sampled(dataset)) is not None:
        yield from _known(path, rows)
    elif has_length(dataset):
        for name, value in getattr(dataset, "__dict__", {}).items():
            yield from _attribute(value, f"{path}.{name}", len(dataset), depth)


def _attribute(value: Any, path: str, count: int, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the places in an attribute of a dataset of `count` rows."""
    if _is_of_datasets(value) or isinstance(value, Dataset):
        yield from _places(value, path, depth + 1)
    elif _are_datasets(value):
        for number, part in enumerate(value):
            yield from _places(part, f"{path}.{number}", depth + 1)
    elif isinstance(value, Mapping):
        yield from _mapping(value, path, count)
    elif (rows := _sampled(value, count)) is not None:
        yield from _known(path, rows)


def _mapping(value: Mapping[Any, Any], path: str, count: int) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a mapping, such as the encodings of a tokenizer, or the numbers of words."""
    if _are_numbers_of_words(value):
        # A sum of hashes does not depend on the order of the words
        total = sum(xxhash.xxh3_64_intdigest(f"{word}={value[word]}".encode()) for word in value)
        yield path, total % 2**64
        return
    if len(value) > _SAMPLED_ITEMS:
        return
    for name, column in value.items():
        if (rows := _sampled(column, count)) is not None:
            yield from _known(f"{path}.{name}", rows)


def _are_numbers_of_words(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping gives every word a number of its own; one that counts words does not."""
    if not 2 <= len(value) <= _MAX_WORDS:
        return False
    numbers = set()
    for word, number in value.items():
        if type(word) is not str or type(number) is not int:
            return False
        numbers.add(number)
    return len(numbers) == len(value)


def _columns(dataset: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a dataset of `datasets` that hold texts or whole numbers, without decoding any."""
    import pyarrow
    import pyarrow.compute

    if not len(dataset):
        return
    plain = []
    for name in dataset.column_names:
        if name.startswith(_OF_BATCHES):
            continue
        column = dataset.data.schema.field(name)
        if _is_plain(pyarrow, column.type):
            plain.append(name)
    if not plain:
        return
    table = dataset.with_format("arrow", columns=plain)[_positions(len(dataset))]
    for name in plain:
        column = table.column(name)
        if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
            column = pyarrow.compute.list_slice(column, 0, _SAMPLED_ITEMS)
        yield from _known(f"{path}.{name}", column.to_pylist())


def _is_plain(pyarrow: Any, kind: Any) -> bool:
    """Return whether a type of Arrow consists of texts and whole numbers."""
    types = pyarrow.types
    if types.is_nested(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return all(_is_plain(pyarrow, field.type) for field in fields)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_number = types.is_integer(kind) or types.is_boolean(kind)
    return bool(is_text or is_number)


def _sampled(value: Any, count: int | None = None) -> list[Any] | None:
    """Return some rows of a value that holds `count` rows; None if it does not, or may call functions of users."""
    is_table = _is_of_pandas(value)
    if not is_table and type(value) not in (list, tuple, range, np.ndarray, torch.Tensor):
        return None
    if getattr(value, "ndim", 1) == 0:
        return None
    size = len(value)
    if size == 0 or count not in (None, size):
        return None
    positions = _positions(size)
    if is_table:
        table = value.iloc[positions]
        rows: list[Any] = table.to_dict("records") if hasattr(table, "columns") else table.tolist()
        return rows
    return [value[position] for position in positions]


def _known(path: str, rows: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield a place whose rows are all there, and of which something can be compared; a cache has no rows yet."""
    if any(row is None for row in rows):
        return
    plain = [_plain(row) for row in rows]
    if any(_has_content(row) for row in plain):
        yield path, plain


def _positions(count: int) -> list[int]:
    last = count - 1
    return sorted({number * last // (_SAMPLED_ROWS - 1) for number in range(_SAMPLED_ROWS)})


def _plain(value: Any) -> Any:
    """Return what counts of a row, as a JSON value."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, PurePath):
        return value.name
    if isinstance(value, str):
        return _without_folder(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return _plain_array(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in list(value.items())[:_SAMPLED_ITEMS]}
    if type(value) in (list, tuple):
        return [_plain(item) for item in value[:_SAMPLED_ITEMS]]
    return None


def _plain_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_plain = not (value.is_floating_point() or value.is_complex())
    else:
        is_plain = value.dtype.kind in "biuU"
    if not is_plain:
        return None
    items = value.reshape(-1)[:_SAMPLED_ITEMS]
    return _plain(items.tolist())


def _without_folder(text: str) -> str:
    """Return a text, and of a path or an address the name of the file."""
    is_word = "/" in text and len(text.split()) == 1
    is_path = text.startswith(("/", "./", "../", "~/")) and "\n" not in text
    if not (is_word or is_path):
        return text
    if "://" in text:
        text, _, _signature = text.partition("?")  # which expires
    return PurePath(text).name


def _has_content(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_content(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_content(item) for item in value)
    return value is not None


def _are_datasets(value: Any) -> bool:
    if type(value) not in (list, tuple) or not 0 < len(value) <= _SAMPLED_ITEMS:
        return False
    return all(_is_of_datasets(part) or isinstance(part, Dataset) for part in value)


def _is_of_datasets(value: Any) -> bool:
    library = sys.modules.get("datasets")  # Trainer works without it
    return library is not None and isinstance(value, library.Dataset)


def _is_of_pandas(value: Any) -> bool:
    library = sys.modules.get("pandas")
    return library is not None and isinstance(value, library.DataFrame | library.Series)


def _hash(content: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())
