"""A checksum of tensors where they are: 64 bits that notice every single flipped bit, as fast as memory is read."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from dure.torchcompat import bytes_of

_FACTOR = -1640531527
"""An odd number, 2^32 over the golden ratio: its powers have no short pattern that data could share."""
_MODULUS = 1 << 64
_LANES = {"cpu": 1 << 16}
"""Words that are taken side by side: as many as a core's second cache holds twice (256 KiB)."""
_LANES_ELSEWHERE = 1 << 20
"""An accelerator takes a few microseconds for any operation, and wants much to do in each."""
_SMALL_BYTES = 1 << 16
"""Tensors of fewer bytes are put together first: one operation costs as much as this many bytes."""


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return 64 bits over the bytes of tensors, which depend on every bit, every byte's place and every length.

    The bytes are read as 32-bit words w, dealt to lanes in turn. A lane's state becomes s <- mix(s f + w) modulo 2^32
    with an odd factor f, where mix adds the upper half of the bits to the lower one by exclusive or. In the end each
    lane's state is multiplied by an odd number of 64 bits of its own, and all are added up modulo 2^64.

    That a change within one word, as one flipped bit is, always changes the sum: for one s another w gives another
    s f + w, and mix takes two numbers to one never (the upper half stays, and so the lower one can be had back), so
    the lane's state is another one. Every later word of the lane keeps two states apart, f being odd and mix as
    before. So one lane ends with another state, by a difference of less than 2^32 in size that is not zero, and no
    odd number makes that a multiple of 2^64. Changes of several words go unnoticed with a chance of about 2^-64, or
    2^-32 if they are all in one lane, which are 256 KiB apart. (Without mix two flips of the highest bit of words in
    one lane would always cancel: 2^31 times anything odd is 2^31.)

    Args:
        tensors: Of any dtype, on any devices; large ones are read where they are, if they are dense in memory.
    """
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
    total = lengths
    for device, words in by_device.items():
        total = (total * _FACTOR + _sum(words, device)) % _MODULUS
    return total


def _sum(all_words: list[Tensor], device: torch.device) -> int:
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
    return int((states * _lane_factors(num_lanes, device)).sum().item())


@lru_cache(maxsize=4)
def _lane_factors(num_lanes: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(1 << 63), (1 << 63) - 1, (num_lanes,), generator=generator, dtype=torch.int64)
    return (numbers | 1).to(device)


def _words(data: Tensor) -> Iterator[Tensor]:
    """Yield bytes as 32-bit words, and those that are left over."""
    if data.storage_offset() % 4:
        data = data.clone()  # memory can be seen as words only from a word's edge
    whole = data.numel() // 4 * 4
    if whole:
        yield data[:whole].view(torch.int32)
    if whole < data.numel():
        yield data[whole:]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of all elements, in the order in which they lie in memory where there is no gap."""
    if not tensor.is_contiguous():
        # channels_last and the like: dense, in another order of dimensions
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return bytes_of(tensor)
