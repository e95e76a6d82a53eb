"""The rows with which a script trains for a few steps: the first, the end, and every kind of row at the same time."""

import pytest

from hfscale.check.short_run import _full_steps, _kinds_of_rows, _part


def images_of(rows):
    return [bool(rows[index]["images"]) for index in range(len(rows))]


@pytest.mark.parametrize(("rows", "kept"), [(101, 16 + 5), (104, 24), (20, 20), (24, 24)])
def test_the_end_of_the_data_stays_as_uneven_as_it_is(rows, kept):
    data = list(range(rows))
    part = _part(data, 3, 8)
    assert len(part) == kept
    assert len(part) % 8 == rows % 8
    assert part[0] == 0
    assert part[len(part) - 1] == (rows - 1 if rows % 8 else min(rows, 24) - 1)


def test_each_batch_has_rows_of_one_kind_and_the_next_of_another():
    data = [{"text": "a", "images": [1] if row % 10 else []} for row in range(101)]
    part = _part(data, 3, 8, _kinds_of_rows(data), 2)
    assert images_of(part) == [index // 2 % 2 == 1 for index in range(16 + 5)]


def test_rows_of_one_kind_stay_in_their_order():
    data = [{"text": str(row)} for row in range(101)]
    assert len(_kinds_of_rows(data)) == 1
    assert [row["text"] for row in _part(data, 2, 4, _kinds_of_rows(data), 2)] == ["0", "1", "2", "3", "100"]


@pytest.mark.parametrize("dataset", [None, iter([]), [], [1, 2]])
def test_other_datasets_are_left_as_they_are(dataset):
    assert _kinds_of_rows(dataset) == []
    assert _part(dataset, 6, 8) is dataset


def test_a_part_has_the_other_attributes_of_its_dataset():
    class Rows(list):
        column_names = ("text",)

    assert _part(Rows(range(100)), 2, 8).column_names == ("text",)


def test_a_dataset_of_datasets_selects_by_itself():
    datasets = pytest.importorskip("datasets")
    part = _part(datasets.Dataset.from_dict({"text": list(range(101))}), 2, 8)
    assert part["text"][:] == [*range(8), 96, 97, 98, 99, 100]


@pytest.mark.parametrize(("rows", "kept"), [(101, 24), (17, 16), (5, 5)])
def test_runs_that_are_compared_have_full_steps(rows, kept):
    assert len(_full_steps(list(range(rows)), 3, 8)) == kept
