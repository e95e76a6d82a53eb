"""The hash of a tensor's bits: it sees each flipped bit, and several flips do not cancel."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfscale.core import bit_hash as module
from hfscale.core.bit_hash import HashQueue, bit_hash, bit_hashes, numbers_of, weighted_sum
from hfscale.why.digests import DigestQueue

HASHES = [bit_hash, weighted_sum]  # on a CPU, and elsewhere


def weighted_sums(tensors):
    """What `bit_hashes` returns for tensors of a GPU."""
    queue = HashQueue(copies=False)
    for tensor in tensors:
        queue.add_weighted(tensor)
    return queue.take()


def flipped(tensor, *places):
    """Return a copy with bits flipped: (element, bit)."""
    changed = tensor.clone()
    bits = changed.view(-1).view(torch.uint8)
    for element, bit in places:
        bits[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    return changed


@pytest.mark.parametrize("hashed", HASHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_each_bit_counts(hashed, dtype):
    tensor = torch.zeros(3, 7) if dtype == torch.bool else torch.randn(3, 7) * 100
    tensor = tensor.to(dtype)
    bits = [0] if dtype == torch.bool else range(tensor.element_size() * 8)
    hashes = {int(hashed(flipped(tensor, (element, bit)))) for element in range(21) for bit in bits}
    assert len(hashes | {int(hashed(tensor))}) == 21 * len(bits) + 1


@pytest.mark.parametrize("hashed", HASHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bit_of_two_elements_does_not_cancel(hashed, dtype):
    for values in (torch.zeros(24), torch.randn(24)):
        tensor = values.to(dtype)
        last = tensor.element_size() * 8 - 1
        places = [((a, bit), (b, bit)) for a in range(24) for b in range(a) for bit in (0, last)]
        seen = {int(hashed(flipped(tensor, *pair))) for pair in places}
        assert int(hashed(tensor)) not in seen
        assert len(seen) == 24 * 23


@pytest.mark.parametrize("hashed", HASHES)
def test_rows_do_not_cancel(hashed, monkeypatch):
    monkeypatch.setattr(module, "_ROW", 8)
    monkeypatch.setattr(module, "_ROWS", 2)
    module._weights.cache_clear()
    tensor = torch.randn(29)
    places = [(element, bit) for element in range(29) for bit in (3, 31)]
    seen = {int(hashed(flipped(tensor, a, b))) for a in places for b in places if a < b}
    seen |= {int(hashed(flipped(tensor, a))) for a in places} | {int(hashed(tensor))}
    assert len(seen) == 58 * 57 // 2 + 58 + 1
    module._weights.cache_clear()


@pytest.mark.parametrize("hashed", HASHES)
def test_only_bits_and_order_matter(hashed):
    tensor = torch.randn(9, 5).to(torch.bfloat16)
    base = torch.cat([tensor.new_zeros(1), tensor.view(-1)])
    at_odd_place = base[1:45]  # its bytes are not at a multiple of four
    assert hashed(at_odd_place) == hashed(at_odd_place.clone())
    assert hashed(tensor.t()) == hashed(tensor.t().contiguous())
    assert hashed(tensor.t()) != hashed(tensor)
    assert hashed(torch.zeros(3)) != hashed(torch.zeros(4))
    assert hashed(torch.tensor(1.0)) != hashed(torch.tensor(-1.0))
    assert hashed(torch.zeros(2)) != hashed(-torch.zeros(2))
    assert hashed(torch.zeros(0)).dtype == torch.int64


def test_a_hashed_storage_can_still_be_resized():
    """FSDP2 frees gathered parameters by resizing their storage, which `Tensor.numpy` forbids."""
    gathered = torch.arange(8.0)
    bit_hash(gathered[2:])
    DigestQueue().add(gathered[2:], lambda digest: None)
    gathered.untyped_storage().resize_(0)


class Kernels(TorchDispatchMode):
    """Counts the operations that would be kernels on a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("elements", "dtype", "hashed"),
    [
        (0, torch.float32, 0),
        (7, torch.bfloat16, 5416843043583575539),
        (5, torch.uint8, 3085427318159184798),
        (999, torch.float32, 8450632238593846965),
        (35000, torch.float32, 785824765562109127),  # several blocks and a rest
    ],
)
def test_a_small_tensor_is_hashed_by_three_kernels(elements, dtype, hashed, monkeypatch):
    """A replay hashes hundreds of them. The hashes stay those of files that were written before."""
    monkeypatch.setattr(module, "_ROW", 1000)
    module._weights.cache_clear()
    tensor = (torch.arange(elements) % 251).to(dtype)
    weighted_sum(tensor)  # makes the weights
    with Kernels() as kernels:
        found = weighted_sum(tensor)
    module._weights.cache_clear()
    assert int(found) == hashed
    assert elements > 1000 or kernels.count == 3


@pytest.mark.parametrize(("row", "rows"), [(8, 2), (16, 4), (2**20, 16)])
def test_many_tensors_have_the_hashes_that_each_has_alone(row, rows, monkeypatch):
    monkeypatch.setattr(module, "_ROW", row)
    monkeypatch.setattr(module, "_ROWS", rows)
    monkeypatch.setattr(module, "_JOINED", 2 * row)
    module._weights.cache_clear()
    sizes = [1, 0, 7, 8, 9, 15, 16, 17, 23, 24, 31, 63, 64, 65, 66, 67, 68, 79, 80, 100]
    tensors = [torch.randn(size) * 100 for size in sizes]
    tensors += [tensor.to(torch.bfloat16) for tensor in tensors] + [torch.randn(3, 5).T, torch.randn(40)[3:20]]
    tensors += [torch.randn(30).to(torch.bfloat16)[1:21], torch.arange(33), torch.tensor([True, False, True])]
    assert numbers_of(weighted_sums(tensors)) == [int(weighted_sum(tensor)) for tensor in tensors]
    assert numbers_of(bit_hashes(tensors)) == [int(bit_hash(tensor)) for tensor in tensors]
    assert bit_hashes([]) == []
    module._weights.cache_clear()


def kernels_of(tensors):
    """Return how many kernels hash tensors together, and one after another."""
    weighted_sums(tensors)  # what is kept is made
    together, alone = Kernels(), Kernels()
    with together:
        weighted_sums(tensors)
    with alone:
        for tensor in tensors:
            weighted_sum(tensor)
    return together.count, alone.count


def test_many_small_tensors_take_few_kernels():
    tensors = [torch.randn(300, 7) for _ in range(417)]  # 139 weights with two moments each
    together, alone = kernels_of(tensors)
    assert together <= 12
    assert alone >= 3 * len(tensors)


def test_a_few_large_tensors_take_few_kernels_each():
    tensors = [torch.zeros(2**20 + 5 * number) for number in range(6)]
    together, alone = kernels_of(tensors)
    assert together <= 5 * len(tensors) + 20
    assert alone >= 15 * len(tensors)
