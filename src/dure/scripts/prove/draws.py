"""Random numbers that follow the samples: a rank draws for its samples what one process draws for the same ones.

Then a comparison sees what is behind noise, masks and mixtures that are drawn in the loop. A draw counts as one for the
samples if its first dimension is the batch; all other draws are the same on all ranks and in one process, if they have
the same size there. Whether they have is seen at the state of the generators.
"""

import functools
import hashlib
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_OF_SHAPE = ("rand", "randn", "randint")
_LIKE = ("rand_like", "randn_like", "randint_like", "bernoulli")
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")


class Draws:
    """Draws of this process, from its first batch on."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._batch: tuple[int, Sequence[int], str] | None = None
        """Samples of the batch, the ranks from which they are in equal shares, and a name of the fetch."""
        self._count = 0

    def install(self) -> None:
        """Replace the functions that draw."""
        for name in _OF_SHAPE:
            setattr(torch, name, self._of_shape(getattr(torch, name), has_bounds=name == "randint"))
        for name in _LIKE:
            setattr(torch, name, self._like(getattr(torch, name)))
        for name in _IN_PLACE:
            setattr(Tensor, name, self._in_place(getattr(Tensor, name)))
        torch.randperm = self._permuting(torch.randperm)
        np.random.permutation = self._permuting_numpy(np.random.permutation)

    def begin_batch(self, size: int, ranks: Sequence[int], fetch: str) -> None:
        """Draw for another batch from now on.

        Args:
            size: Samples of the batch.
            ranks: Ranks from which these are, in equal shares.
            fetch: Name of the fetch, which is the same on all ranks and in one process.
        """
        self._batch, self._count = (size, ranks, fetch), 0
        seed = _seed_of(fetch)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def end_batch(self) -> str:
        """Draw as ever from now on; return a digest of the generators' states."""
        self._batch = None
        numbers: Any = np.random.get_state()
        states = (torch.get_rng_state().numpy().tobytes(), numbers[1].tobytes(), numbers[2], random.getstate())
        return hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()

    def _shares(self, length: int, settings: Any) -> list[tuple[int, torch.Generator]]:
        """Return length and generator of the draw of each rank; nothing if the draw is not one for the samples."""
        is_own = settings.get("generator") is None and settings.get("out") is None and os.getpid() == self._pid
        if not is_own or self._batch is None or torch.compiler.is_compiling():
            return []
        size, ranks, fetch = self._batch
        if length != size or size % len(ranks) or size == len(ranks):  # a single number is one for all samples
            return []
        self._count += 1
        seeds = [_seed_of(f"{fetch} {self._count} {rank}") for rank in ranks]
        return [(size // len(ranks), torch.Generator().manual_seed(seed)) for seed in seeds]

    def _of_shape(self, draw: Callable[..., Tensor], *, has_bounds: bool) -> Any:
        @functools.wraps(draw)
        def drawing(*args: Any, **settings: Any) -> Tensor:
            bounds, shape = (args[:-1], args[-1:]) if has_bounds else ((), args)
            if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size):
                shape = tuple(shape[0])
            is_plain = bool(shape) and all(isinstance(each, int) for each in shape)
            shares = self._shares(shape[0], settings) if is_plain and "size" not in settings else []
            if not shares:
                return draw(*args, **settings)
            parts = [draw(*bounds, (length, *shape[1:]), **settings, generator=numbers) for length, numbers in shares]
            return torch.cat(parts)

        return drawing

    def _like(self, draw: Callable[..., Tensor]) -> Any:
        @functools.wraps(draw)
        def drawing(input: Tensor, *args: Any, **settings: Any) -> Tensor:
            shares = self._shares(len(input), settings) if isinstance(input, Tensor) and input.dim() else []
            if not shares:
                return draw(input, *args, **settings)
            parts = input.split([length for length, _ in shares])
            drawn = [
                draw(part, *args, **settings, generator=numbers)
                for part, (_, numbers) in zip(parts, shares, strict=True)
            ]
            return torch.cat(drawn)

        return drawing

    def _in_place(self, draw: Callable[..., Tensor]) -> Any:
        @functools.wraps(draw)
        def drawing(filled: Tensor, *args: Any, **settings: Any) -> Tensor:
            shares = self._shares(len(filled), settings) if filled.dim() else []
            if not shares:
                return draw(filled, *args, **settings)
            parts = filled.split([length for length, _ in shares])
            for part, (_, numbers) in zip(parts, shares, strict=True):
                draw(part, *args, **settings, generator=numbers)
            return filled

        return drawing

    def _permuting(self, draw: Callable[..., Tensor]) -> Any:
        @functools.wraps(draw)
        def drawing(n: int, **settings: Any) -> Tensor:
            shares = self._shares(n, settings)
            if not shares:
                return draw(n, **settings)
            parts = [draw(length, **settings, generator=numbers) for length, numbers in shares]
            return torch.cat([part + place * len(part) for place, part in enumerate(parts)])

        return drawing

    def _permuting_numpy(self, draw: Callable[..., Any]) -> Any:
        @functools.wraps(draw)
        def drawing(x: Any) -> Any:
            shares = self._shares(int(x), {}) if isinstance(x, int | np.integer) else []
            if not shares:
                return draw(x)
            parts = [torch.randperm(length, generator=numbers).numpy() for length, numbers in shares]
            return np.concatenate([part + place * len(part) for place, part in enumerate(parts)])

        return drawing


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
