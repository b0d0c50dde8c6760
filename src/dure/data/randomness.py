"""Randomness that belongs to a sample: drawn from (seed, epoch, sample index) and nothing else.

A sample must be augmented the same way on any number of ranks and loader workers. Two ways lead there:
the fetch seeds Python's, NumPy's and torch's global generators for each sample (`seeded_for_sample`), and data
sets that make a whole batch in one call draw with `sample_uniform`, which is a function of the index.
"""

import random
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1
_position = threading.local()


def mix(*values: int) -> int:
    """Mix whole numbers into 64 well-spread bits (splitmix64's finaliser, Steele et al. 2014, over each value)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@contextmanager
def at_epoch(seed: int, epoch: int) -> Iterator[None]:
    """Say which seed and epoch the fetches inside belong to."""
    before = getattr(_position, "value", (0, 0))
    _position.value = (seed, epoch)
    try:
        yield
    finally:
        _position.value = before


def seed_for_sample(seed: int, epoch: int, index: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators for one sample (about 9 us)."""
    value = mix(seed, epoch, index)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


def seed_for_batch(seed: int, epoch: int, indices: Sequence[int] | np.ndarray) -> None:
    """Seed the same generators for a batch, by its samples in their order."""
    digest = zlib.crc32(np.ascontiguousarray(indices, dtype=np.int64).tobytes())
    seed_for_sample(mix(seed, 0x62617463, epoch), len(indices), digest)


@contextmanager
def kept_global_randomness() -> Iterator[None]:
    """Put Python's, NumPy's and torch's CPU generators back as they were."""
    python, numpy_, torch_ = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_)
        torch.default_generator.set_state(torch_)


def sample_uniform(indices: Sequence[int] | np.ndarray, num_draws: int = 1) -> torch.Tensor:
    """Draw uniform numbers in [0, 1) that belong to the samples, for augmenting a batch in one go.

    Only meaningful while dure fetches data; elsewhere seed and epoch are 0.

    Args:
        indices: Data indices `(B,)`.
        num_draws: Numbers per sample.

    Returns:
        float64 `(B, num_draws)`; row `i` depends on (seed, epoch, `indices[i]`) alone.
    """
    seed, epoch = getattr(_position, "value", (0, 0))
    with np.errstate(over="ignore"):
        state = np.asarray(indices, dtype=np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
        state = state ^ np.uint64(mix(seed, epoch)) ^ (np.arange(1, num_draws + 1, dtype=np.uint64) << np.uint64(40))
        for _ in range(2):
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)
