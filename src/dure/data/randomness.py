"""Random numbers of a sample, which depend on (seed, epoch, sample index) and nothing else.

A sample must be augmented in the same way on any number of ranks and loader workers. There are two ways. The fetch
seeds the global generators of Python, NumPy and torch for each sample (`seed_for_sample`). Data sets that return whole
batches draw with `sample_uniform`, which is a function of the index.
"""

import random
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from dure.torchcompat.devices import default_generator

_MASK = (1 << 64) - 1
_position = threading.local()


def mix(*values: int) -> int:
    """Mix integers into 64 well-distributed bits (splitmix64's finaliser, Steele et al. 2014, over each value)."""
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
    """Set the seed and epoch of the fetches inside the context."""
    before = getattr(_position, "value", (0, 0))
    _position.value = (seed, epoch)
    try:
        yield
    finally:
        _position.value = before


def seed_for_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the CPU generators of Python, NumPy and torch for one sample (about 9 us)."""
    value = mix(seed, epoch, index)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)


def seed_for_batch(seed: int, epoch: int, indices: Sequence[int] | np.ndarray) -> None:
    """Seed the same generators for a batch, by its samples in order."""
    digest = zlib.crc32(np.ascontiguousarray(indices, dtype=np.int64).tobytes())
    seed_for_sample(mix(seed, 0x62617463, epoch), len(indices), digest)


class GeneratorStates(NamedTuple):
    """States of the generators that code draws from by default: those of Python, NumPy and torch."""

    of_python: Any
    of_numpy: Any
    of_cpu: torch.Tensor
    of_devices: tuple[tuple[torch.device, torch.Tensor], ...]

    @classmethod
    def now(cls, *devices: torch.device) -> "GeneratorStates":
        """Return the current states, including those of the accelerators among `devices`."""
        of_devices = tuple((device, default_generator(device).get_state()) for device in drawing_devices(devices))
        return cls(random.getstate(), np.random.get_state(), torch.default_generator.get_state(), of_devices)

    def is_same_as(self, other: "GeneratorStates") -> bool:
        """Return whether nothing was drawn between two states."""
        (_, keys, *rest), (_, other_keys, *other_rest) = self.of_numpy, other.of_numpy
        return (
            self.of_python == other.of_python
            and rest == other_rest
            and np.array_equal(keys, other_keys)
            and torch.equal(self.of_cpu, other.of_cpu)
            and all(torch.equal(a, b) for (_, a), (_, b) in zip(self.of_devices, other.of_devices, strict=True))
        )

    def put_back(self) -> None:
        """Restore the generators to these states."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.default_generator.set_state(self.of_cpu)
        for device, state in self.of_devices:
            default_generator(device).set_state(state)


def drawing_devices(devices: Iterable[torch.device]) -> list[torch.device]:
    """Return the devices that have their own generator, unlike the CPU, each once and in order."""
    return [device for device in dict.fromkeys(devices) if device.type not in ("cpu", "meta")]


def seed_draws(device: torch.device, seed: int, number: int) -> None:
    """Seed all generators that code on a device draws from, with a number that separates independent uses."""
    seed_for_sample(seed, number, 0)
    for own in drawing_devices([device]):
        default_generator(own).manual_seed(mix(seed, number) >> 1)


@contextmanager
def kept_global_randomness(*devices: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy, torch and the accelerators in `devices` afterwards."""
    before = GeneratorStates.now(*devices)
    try:
        yield
    finally:
        before.put_back()


def sample_uniform(indices: Sequence[int] | np.ndarray, num_draws: int = 1) -> torch.Tensor:
    """Draw uniform numbers in [0, 1) that depend on the samples, to augment a whole batch.

    This is meaningful only while dure fetches data; elsewhere seed and epoch are 0.

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
