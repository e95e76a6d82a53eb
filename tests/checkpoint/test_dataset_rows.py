"""A resume with other rows, another order or other numbers of labels is seen, and nothing of a user is called."""

import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
import torch
from tiny import RandomTokens, tiny_model
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers import BatchEncoding

from hfscale.checkpoint.dataset_rows import labels_of, row_hashes

COUNT = 40
WORDS = [f"w{number}" for number in range(COUNT)]


class Holds(Dataset):
    """A dataset of a user, with attributes; reading a row of it fails."""

    def __init__(self, count=COUNT, **attributes):
        self.count = count
        vars(self).update(attributes)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        raise AssertionError("a function of the user was called")


def table(words):
    return datasets.Dataset.from_dict({"sentence": words, "label": [len(word) for word in words]})


PLACES = {
    "list": (list, {"sample"}),
    "column": (table, {"sample.sentence", "sample.label"}),
    "permuted column": (
        lambda words: table(WORDS).select([WORDS.index(word) for word in words]),
        {"sample.sentence", "sample.label"},
    ),
    "parts": (lambda words: {"a": table(words), "b": table(WORDS)}, {"sample.a.sentence", "sample.a.label"}),
    "attribute": (lambda words: Holds(texts=words), {"sample.texts"}),
    "dictionaries": (lambda words: Holds(rows=[{"text": word, "score": 0.5} for word in words]), {"sample.rows"}),
    "array": (lambda words: Holds(names=np.array(words)), {"sample.names"}),
    "tensor": (lambda words: Holds(ids=torch.tensor([int(word[1:]) for word in words])), {"sample.ids"}),
    "encodings": (
        lambda words: Holds(encodings=BatchEncoding({"input_ids": [[int(word[1:])] for word in words]})),
        {"sample.encodings.input_ids"},
    ),
    "frame": (lambda words: Holds(frame=pandas.DataFrame({"text": words})), {"sample.frame"}),
    "series": (lambda words: Holds(texts=pandas.Series(words)), {"sample.texts"}),
    "indices": (lambda words: Subset(Holds(), [WORDS.index(word) for word in words]), {"sample.indices"}),
    "inner": (lambda words: Holds(inner=Holds(texts=words)), {"sample.inner.texts"}),
    "several": (
        lambda words: ConcatDataset([Holds(texts=words), Holds(texts=WORDS)]),
        {"sample.datasets.0.texts", "sample.datasets.1.texts"},
    ),
    "numbers of words": (
        lambda words: Holds(numbers={word: number for number, word in enumerate(words)}),
        {"sample.numbers"},
    ),
}


@pytest.mark.parametrize("kind", PLACES)
def test_another_order_is_another_hash(kind):
    make, places = PLACES[kind]
    first, same, reversed_ = (row_hashes(make(words)) for words in (WORDS, list(WORDS), WORDS[::-1]))
    assert places <= set(first)
    assert first == same
    changed = {place for place in first if first[place] != reversed_[place]}
    assert changed
    assert changed <= places


def test_columns_are_sampled_over_all_rows():
    words = [*WORDS[:-1], "other"]
    assert row_hashes(table(WORDS)) != row_hashes(table(words))
    middle = [*WORDS[:8], "other", *WORDS[9:]]
    assert row_hashes(table(WORDS))["sample.sentence"] == row_hashes(table(middle))["sample.sentence"], "16 rows"


SAME = {
    "a cache that has been filled": (Holds(cache=[None] * 20 + [1] * (COUNT - 20)), Holds(cache=[1] * COUNT)),
    "a folder that has moved": (
        Holds(files=[f"/mnt/a b/{word}.png" for word in WORDS]),
        Holds(files=[f"/data/{word}.png" for word in WORDS]),
    ),
    "a Path": (Holds(files=[Path("a") / word for word in WORDS]), Holds(files=[Path("b") / word for word in WORDS])),
    "an address with a signature": (
        Holds(files=[f"https://host/{word}?signature=1" for word in WORDS]),
        Holds(files=[f"https://host/{word}?signature=2" for word in WORDS]),
    ),
    "numbers that are computed": (Holds(scores=[0.1] * COUNT), Holds(scores=[0.10000001] * COUNT)),
    "words that are counted": (Holds(seen={"a": 1, "b": 1}), Holds(seen={"a": 3, "b": 3})),
    "words in another order with the same numbers": (
        Holds(numbers={"a": 0, "b": 1}),
        Holds(numbers={"b": 1, "a": 0}),
    ),
    "an attribute of another length": (Holds(seeds=[1, 2]), Holds(seeds=[3, 4])),
    "objects": (Holds(rows=[object() for _ in WORDS]), Holds(rows=[object() for _ in WORDS])),
    "a count": (Holds(epoch=1), Holds(epoch=2)),
    "images": (
        datasets.Dataset.from_dict({"image": [{"bytes": b"a", "path": "x"}] * COUNT}),
        datasets.Dataset.from_dict({"image": [{"bytes": b"b", "path": "y"}] * COUNT}),
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_what_may_differ_between_launches_has_no_hash_or_the_same(what):
    one, other = (row_hashes(dataset) for dataset in SAME[what])
    assert all(one[place] == other[place] for place in one if place in other)


class WithoutLength(Dataset):
    """Has a length only when it is filled, as some pipelines do."""

    def __len__(self):
        raise TypeError("its length is not known")


NOTHING = {
    "an unknown length": WithoutLength(),
    "empty list": [],
    "no rows": Holds(count=0),
    "no rows of datasets": datasets.Dataset.from_dict({"text": []}),
    "a scalar": Holds(scalar=torch.tensor(3)),
    "an empty attribute": Holds(nothing=[]),
    "numbers with a fraction": torch.utils.data.TensorDataset(torch.zeros(COUNT, 2)),
    "none": None,
    "no dataset": 3,
}


@pytest.mark.parametrize("kind", NOTHING)
def test_a_dataset_without_known_rows_has_no_hash(kind):
    assert row_hashes(NOTHING[kind]) == {}


def test_datasets_inside_each_other_end():
    outer = Holds()
    outer.inner = outer
    assert row_hashes(outer) == {}


def test_long_rows_and_vocabularies_are_not_read_whole():
    ids = [[number] * 100_000 for number in range(COUNT)]
    assert row_hashes(ids)
    assert row_hashes(Holds(vocabulary={str(number): number for number in range(300_000)})) == {}


def test_labels_have_a_hash_of_their_order_and_of_their_names():
    configs = [tiny_model(id2label=dict(enumerate(names))).config for names in ("abc", "cba", "abd")]
    first, permuted, renamed = map(labels_of, configs)
    assert first["label_names"] == permuted["label_names"] != renamed["label_names"]
    assert len({each["labels"] for each in (first, permuted, renamed)}) == 3
    assert labels_of(tiny_model(num_labels=3).config) == {}
    assert labels_of(None) == {}


SET = """
from tiny import tiny_model
from hfscale.checkpoint.dataset_rows import labels_of
names = list({"cat", "dog", "horse", "cow", "pig", "hen"})
print(labels_of(tiny_model(id2label=dict(enumerate(names))).config)["labels"])
"""


def test_labels_that_a_set_has_numbered_differ_between_processes():
    """Python hashes texts with another seed in every process."""
    found = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SET],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )
        found.add(done.stdout.splitlines()[-1])
    assert len(found) == 2


def test_the_rows_of_the_tests_are_tensors():
    assert set(row_hashes(RandomTokens())) == {"sample.rows"}


def test_columns_that_follow_from_the_batch_have_no_hash():
    """TRL's KTO pairs each prompt with the completion of another row of a device's batch."""
    rows = table(WORDS).add_column("KL_completion_ids", [[number] for number in range(COUNT)])
    assert row_hashes(rows) == row_hashes(table(WORDS))
