"""What a stream yields is recognised by a hash, whatever it is."""

import numpy as np
import pytest
import torch

from hfscale.trainer.batch_indices import digest_of


class Image:
    """It has no text of its own: `repr` has its address."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"input_ids": list(range(100)), "label": 3},
        lambda: {"pixel_values": torch.ones(3, 2, 2), "label": torch.tensor(3)},
        lambda: {"values": np.zeros(4), "label": np.array(3), "none": None},
        lambda: {"translation": {"en": "a house", "de": "ein Haus"}, "ids": {"a": torch.tensor(1)}},
        lambda: {"image": Image(), "label": 1},
        lambda: (torch.tensor(1), "text"),
        lambda: "text",
        lambda: Image(),
    ],
)
def test_a_sample_of_any_kind_has_the_same_hash_twice(make):
    assert digest_of(make()) == digest_of(make())


def test_other_samples_have_other_hashes():
    samples = [{"a": 1}, {"a": torch.tensor(1)}, {"a": torch.tensor(2)}, {"a": {"b": "c"}}, {"a": {"b": "d"}}]
    assert len({digest_of(sample) for sample in samples}) == len(samples)
