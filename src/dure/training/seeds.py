"""One seed for everything that draws."""

import functools
import os
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dure.data.randomness import mix


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of all accelerators too."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Seed this rank's own draws (dropout): different on every rank, the same in every run."""
    seed_everything(mix(seed, 0x72616E6B, rank) >> 1)


def make_deterministic() -> None:
    """Ask torch for algorithms that give the same bits every time."""
    # cuBLAS reads it when its first handle is made
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def capture_random_state() -> dict[str, Tensor]:
    """Return the state of all generators of this process as tensors, not to be changed.

    As long as a generator draws nothing its tensors are the same objects: from step to step few runs draw from
    Python's or NumPy's.
    """
    version, words, gauss = random.getstate()
    _, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    state = {
        "python": _python_words((version, words)),
        "python_gauss": _python_rest(() if gauss is None else (gauss,)),
        "numpy_keys": _numpy_keys(keys.tobytes()),
        "numpy_rest": _numpy_rest(tuple(rest)),
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    elif _has_mps():
        state["mps"] = torch.mps.get_rng_state()
    return state


class _Kept:
    """A tensor of some numbers, made anew when they are others."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._numbers: Any = None
        self._tensor = torch.empty(0)

    def __call__(self, numbers: Any) -> Tensor:
        if numbers != self._numbers:
            self._numbers, self._tensor = numbers, torch.from_numpy(self._make(numbers))
        return self._tensor


_python_words = _Kept(lambda numbers: np.array((numbers[0], *numbers[1]), dtype=np.int64))
_numpy_keys = _Kept(lambda data: np.frombuffer(data, dtype=np.uint32).astype(np.int64))
_python_rest, _numpy_rest = (_Kept(lambda numbers: np.array(numbers, dtype=np.float64)) for _ in range(2))
_has_mps = functools.cache(torch.backends.mps.is_available)


def restore_random_state(state: dict[str, Tensor]) -> None:
    """Put all generators of this process back as captured."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, cached = state["numpy_rest"].tolist()
    np.random.set_state(
        ("MT19937", state["numpy_keys"].numpy().astype(np.uint32), int(position), int(has_gauss), cached)
    )
    torch.default_generator.set_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
