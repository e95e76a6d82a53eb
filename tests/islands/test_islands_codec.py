"""Compression of pseudo-gradients: exact sizes, bounded errors, error feedback, and payloads that do not fit."""

import pytest
import torch

from hfscale.errors import LayoutError, UsageError
from hfscale.facts.compression import BLOCK, CHUNK, SPARSE_DECAY, Compression
from hfscale.islands.codec import decode, encode, encode_with_feedback
from hfscale.islands.flags import island_callbacks
from hfscale.islands.rendezvous import TOKEN_VARIABLE
from hfscale.recipe.arguments import ScalingArguments

FORMATS = [
    Compression(),
    Compression(bits=8),
    Compression(bits=4),
    Compression(density=0.0156),
    Compression(bits=8, density=0.0156),
    Compression(bits=4, density=0.03),
    Compression(bits=2, density=0.0156),
]


def values(number, seed=0):
    return torch.randn(number, generator=torch.Generator().manual_seed(seed)) * 1e-3


@pytest.mark.parametrize("compression", FORMATS, ids=str)
@pytest.mark.parametrize("number", [1, BLOCK, CHUNK + 1, 3 * CHUNK])
def test_the_payload_has_the_computed_size_and_decodes_to_the_same_number_of_values(compression, number):
    payload = encode(values(number), compression)
    assert payload.numel() == compression.bytes_of(number)
    found = decode(payload, number, compression)
    assert found.shape == (number,)
    assert found.dtype == torch.float32
    assert torch.equal(encode(values(number), compression), payload)


def test_fp32_is_exact():
    assert torch.equal(decode(encode(values(1000), Compression()), 1000, Compression()), values(1000))


@pytest.mark.parametrize("bits", [8, 4])
def test_an_error_is_at_most_half_a_level_and_zero_stays_zero(bits):
    given = values(4 * BLOCK)
    given[::3] = 0
    given[BLOCK : 2 * BLOCK] = 0
    found = decode(encode(given, Compression(bits=bits)), given.numel(), Compression(bits=bits))
    half = given.view(-1, BLOCK).abs().amax(dim=1) / (2**bits - 2)
    assert ((found - given).abs().view(-1, BLOCK) <= half[:, None] * 1.001).all()
    assert (found[::3] == 0).all()
    assert (found[BLOCK : 2 * BLOCK] == 0).all()


def test_top_k_sends_the_largest_values_of_each_chunk_and_nothing_else():
    given, compression = values(2 * CHUNK), Compression(density=64 / CHUNK)
    found = decode(encode(given, compression), given.numel(), compression).view(2, CHUNK)
    for sent, row in zip(found, given.view(2, CHUNK), strict=True):
        largest = row.abs().topk(64).indices
        assert torch.equal(sent[largest], row[largest])
        assert sent.count_nonzero() == 64


def test_two_bits_of_one_value_in_64_are_146_times_fewer_bytes():
    """The figure of Covenant-72B (arXiv 2603.08163); the scale of each chunk costs a part of it."""
    compression = Compression(bits=2, density=64 / CHUNK)
    without_scales = compression.bytes_of(CHUNK) - 4
    assert round(4 * CHUNK / without_scales) == 146


@pytest.mark.parametrize("compression", FORMATS[1:], ids=str)
def test_with_error_feedback_the_sum_of_what_was_sent_approaches_the_sum_of_what_was_given(compression):
    """A constant pseudo-gradient: what rounding or top-k keeps back is sent later; without feedback it never is."""
    given, residual, rounds = values(CHUNK), torch.zeros(CHUNK), 120
    sent = torch.zeros(CHUNK)
    for _ in range(rounds):
        sent += decode(encode_with_feedback(given, residual, compression), CHUNK, compression)
    if compression.density is None:  # what is missing is one residual, however many rounds there were
        assert torch.allclose(sent + residual, rounds * given, atol=1e-5)
        assert residual.abs().max() <= given.abs().max() / (2**compression.bits - 2) * 1.3
    else:
        without = decode(encode(given, compression), CHUNK, compression) * rounds
        target = rounds * given
        assert (sent - target).norm() < 0.8 * (without - target).norm()


def test_with_top_k_what_was_not_sent_fades():
    residual, sparse = torch.ones(CHUNK), Compression(density=4 / CHUNK)
    encode_with_feedback(torch.zeros(CHUNK), residual, sparse)
    assert residual.unique().tolist() == pytest.approx([0.0, SPARSE_DECAY])


def test_not_a_number_is_not_hidden():
    given = values(BLOCK)
    given[7] = float("nan")
    for compression in FORMATS:
        assert decode(encode(given, compression), BLOCK, compression).isnan().any()


@pytest.mark.parametrize("compression", FORMATS, ids=str)
def test_a_payload_of_another_length_or_type_is_refused(compression):
    payload = encode(values(CHUNK), compression)
    for wrong in (payload[:-1], torch.cat([payload, payload[:1]]), payload.to(torch.int16)):
        with pytest.raises(LayoutError, match=str(wrong.numel())):
            decode(wrong, CHUNK, compression)


@pytest.mark.parametrize("compression", FORMATS[1:], ids=str)
def test_damaged_bytes_decode_without_reading_beyond_the_payload(compression):
    size = compression.bytes_of(CHUNK)
    noise = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    assert decode(noise, CHUNK, compression).shape == (CHUNK,)


@pytest.mark.parametrize(
    ("flags", "named"),
    [({"bits": 3}, "^bits is 3"), ({"bits": 2}, "density"), ({"density": 1.5}, r"^density is 1\.5")],
)
def test_a_format_that_does_not_exist_is_refused(flags, named):
    with pytest.raises(UsageError, match=named):
        Compression(**flags)


@pytest.mark.parametrize("flag", [{"island_bits": 3}, {"island_density": 1.5}])
def test_an_error_of_the_format_names_the_flag_of_a_recipe(flag, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    [(name, value)] = flag.items()
    args = ScalingArguments(islands=2, **flag)
    with pytest.raises(UsageError, match=f"^--{name} is {value}: "):
        island_callbacks(args)
