"""One flipped bit always changes the checksum, and nothing that is not in the bytes does."""

import pytest
import torch

from dure.strategies.state import checksum as module
from dure.strategies.state.checksum import checksum, checksums
from dure.training.fault_injection import flip

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.complex64]


def numbers(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 3, 7])
def test_any_bit_when_flipped_then_the_sum_is_another(length, dtype, monkeypatch):
    # few lanes and no small tensors, so that the same code that takes gigabytes takes these
    monkeypatch.setattr(module, "_LANES", {"cpu": 2})
    monkeypatch.setattr(module, "_SMALL_BYTES", 0)
    tensors = [numbers(5), numbers(length, dtype=dtype), numbers(2, 2)]
    sums = {checksum(tensors)}
    bits = [(element, bit) for element in range(length) for bit in range(8 * dtype.itemsize)]
    for element, bit in bits:
        changed = tensors[1].clone()
        flip(changed, element, bit)
        sums.add(checksum([tensors[0], changed, tensors[2]]))
    assert len(sums) == 1 + len(bits)


def test_small_tensors_when_a_bit_is_flipped_then_the_sum_is_another():
    tensors = [numbers(3, dtype=dtype) for dtype in DTYPES] + [torch.tensor(1.0), torch.tensor(7.0)]
    before = checksum(tensors)
    for tensor in tensors:
        flip(tensor, 0, 0)
        after, before = checksum(tensors), before
        assert after != before
        flip(tensor, 0, 0)
    assert checksum(tensors) == before


@pytest.mark.parametrize("num_words", [1, 2, 100, (1 << 15) + 1, 3 * (1 << 15) + 7])
def test_words_when_they_change_places_then_the_sum_is_another(num_words):
    words = numbers(2 * num_words)
    assert checksum([words.flip(0)]) != checksum([words])
    assert checksum([words[:num_words], words[num_words:]]) != checksum([words[num_words:], words[:num_words]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_signs_when_all_are_turned_then_the_sum_is_another(dtype):
    # the highest bit of every word, many times in each lane: what a plain sum of multiples cannot see
    for length in (2, 64, 1 << 16, 1 << 19):
        assert checksum([-numbers(length, dtype=dtype)]) != checksum([numbers(length, dtype=dtype)])


def test_lengths_when_zeros_are_more_then_the_sum_is_another():
    assert len({checksum([torch.zeros(n)] * m) for n in (0, 1, 2) for m in (1, 2, 3)}) == 9
    assert checksum([]) != checksum([torch.zeros(1)])


def test_memory_when_it_begins_elsewhere_then_the_sum_is_the_same():
    padded = numbers(40_001)
    assert checksum([padded[1:]]) == checksum([padded[1:].clone()])


def test_layout_when_dense_then_nothing_is_copied_and_the_order_is_that_of_memory():
    image = numbers(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    assert checksum([last]) == checksum([image.permute(0, 2, 3, 1).contiguous()])
    assert checksum([image[:, :, ::2]]) == checksum([image[:, :, ::2].contiguous()])


def test_checksums_when_compared_then_each_is_that_of_its_tensor():
    tensors = [torch.arange(7), torch.zeros(0), torch.randn(30_000), torch.ones(3, dtype=torch.bfloat16)]
    assert checksums(tensors) == [checksum([tensor]) for tensor in tensors]
    assert checksums([]) == []
