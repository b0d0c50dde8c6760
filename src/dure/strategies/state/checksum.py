"""Checksum of tensors on their devices: 64 bits that detect every single flipped bit, at memory bandwidth."""

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

from dure.torchcompat.tensors import bytes_of

_FACTOR = -1640531527
"""Odd number, 2^32 over the golden ratio: its powers have no short pattern that data could share."""
_MODULUS = 1 << 64
_LANES = {"cpu": 1 << 16}
"""Words that are processed in parallel: 256 KiB, which fit twice into a core's second-level cache."""
_LANES_ELSEWHERE = 1 << 20
"""Lanes on an accelerator, where every operation costs a few microseconds and should have much to do."""
_SMALL_BYTES = 1 << 16
"""Tensors of fewer bytes are concatenated first: one operation costs as much as this many bytes."""


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return 64 bits over the bytes of tensors, which depend on every bit, every byte's position and every length.

    The bytes are read as 32-bit words w, assigned to lanes in turn. A lane's state becomes s <- mix(s f + w) modulo
    2^32 with an odd factor f, where mix XORs the upper half of the bits into the lower one. In the end each lane's
    state is multiplied by its own odd 64-bit number, and all are summed modulo 2^64.

    A change within one word, such as one flipped bit, always changes the sum. For a fixed s, another w gives another s
    f + w. mix is injective (the upper half is kept, from which the lower one can be recovered), so the lane's state
    differs. Every later word of the lane keeps two different states apart, because f is odd and mix is injective. So
    one lane ends with another state, by a nonzero difference of less than 2^32 in size, and no odd number makes that a
    multiple of 2^64. Changes of several words are missed with a probability of about 2^-64, or 2^-32 if they are all in
    one lane, whose words are 256 KiB apart. (Without mix, two flips of the highest bit of words in one lane would
    always cancel: 2^31 times any odd number is 2^31.)

    Args:
        tensors: Tensors of any dtype, on any devices; large ones are read without a copy, if they are dense in memory.
    """
    lengths, parts = _parts(tensors)
    return _total(lengths, [int(part.item()) for part in parts])


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Return the checksum of each tensor, for which the host waits once for each device, and not for each tensor."""
    found = [_parts([tensor]) for tensor in tensors]
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for _, parts in found:
        for part in parts:
            by_device[part.device].append(part)
    numbers = {device: iter(torch.stack(parts).tolist()) for device, parts in by_device.items()}
    return [_total(lengths, [next(numbers[part.device]) for part in parts]) for lengths, parts in found]


def memory_digest(tensors: Iterable[Tensor]) -> int:
    """Return a digest of tensors in host memory, at a third of the cost of copying them; 0 if one is elsewhere.

    It tells different values apart as any hash of 64 bits does, without `checksum`'s promise about single bits.
    """
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return 0
        data = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if data.nbytes:
            digest.update((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
    return digest.intdigest() or 1


def _total(lengths: int, numbers: Iterable[int]) -> int:
    total = lengths
    for number in numbers:
        total = (total * _FACTOR + number) % _MODULUS
    return total


def _parts(tensors: Iterable[Tensor]) -> tuple[int, list[Tensor]]:
    """Return a number of the lengths, and for each device a 0-dim tensor of the sum over its bytes."""
    small: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    large: list[Tensor] = []
    lengths = 0
    for tensor in tensors:
        data = _bytes(tensor)
        size = data.numel()
        lengths = (lengths * 3 + size + 1) % _MODULUS
        if size >= _SMALL_BYTES:
            large.append(data)
        elif size:
            small[data.device].append(data)
    large += [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in small.values()]
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for data in large:
        by_device[data.device] += _words(data)
    return lengths, [_sum(words, device) for device, words in by_device.items()]


def _sum(all_words: list[Tensor], device: torch.device) -> Tensor:
    longest = max(words.numel() for words in all_words)
    num_lanes = min(_LANES.get(device.type, _LANES_ELSEWHERE), longest)
    states = torch.zeros(num_lanes, dtype=torch.int32, device=device)
    upper_halves = torch.empty_like(states)
    for words in all_words:
        for block in words.split(num_lanes):
            state, upper = states[: block.numel()], upper_halves[: block.numel()]
            torch.add(block, state, alpha=_FACTOR, out=state)
            torch.bitwise_right_shift(state, 16, out=upper)
            upper.bitwise_and_(0xFFFF)
            state.bitwise_xor_(upper)
    return (states * _lane_factors(num_lanes, device)).sum()


@lru_cache(maxsize=4)
def _lane_factors(num_lanes: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(1 << 63), (1 << 63) - 1, (num_lanes,), generator=generator, dtype=torch.int64)
    return (numbers | 1).to(device)


def _words(data: Tensor) -> Iterator[Tensor]:
    """Yield bytes as 32-bit words, followed by the remainder."""
    if data.storage_offset() % 4:
        data = data.clone()  # memory can be viewed as words only if it is aligned to words
    whole = data.numel() // 4 * 4
    if whole:
        yield data[:whole].view(torch.int32)
    if whole < data.numel():
        yield data[whole:]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of all elements, in memory order if there are no gaps."""
    if not tensor.is_contiguous():
        # dense, with another order of dimensions, such as channels_last
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return bytes_of(tensor)
