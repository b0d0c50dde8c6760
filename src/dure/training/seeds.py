"""One seed for everything that draws."""

import ctypes
import functools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dure.data.randomness import drawing_devices, mix
from dure.errors import TaskInvalid
from dure.torchcompat import default_generator


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


def chosen_by_timing(device_type: str, step: int) -> list[str]:
    """Return what a run that goes on does not preserve where each start chooses algorithms by timing them.

    Args:
        device_type: Of the run's devices.
        step: After which the run goes on; 0 for one that begins.
    """
    if device_type != "cuda" or not step or not torch.backends.cudnn.benchmark:
        return []
    return [
        "the bits of convolutions after a resume or restart: cuDNN times its algorithms anew at each start and takes "
        "the fastest (--deterministic, or torch.backends.cudnn.benchmark = False in build_model, switches that off)"
    ]


def capture_random_state(devices: Sequence[torch.device] = ()) -> dict[str, Tensor]:
    """Return the state of all generators of this process as tensors, not to be changed.

    As long as a generator draws nothing its tensors are the same objects: from step to step few runs draw from
    Python's or NumPy's.

    Args:
        devices: Of this process. Accelerators are numbered in this order: the next start may give it other ones.

    Raises:
        TaskInvalid: NumPy's global generator is none that a checkpoint knows.
    """
    version, words, gauss = random.getstate()
    keys, rest = _numpy_state.now()
    return {
        "python": _python_words((version, words)),
        "python_gauss": _python_gauss(() if gauss is None else (gauss,)),
        "numpy_keys": keys,
        "numpy_rest": rest,
        "torch": torch.default_generator.get_state(),
        **{name: generator.get_state() for name, generator in _generators(tuple(devices)).items()},
    }


def restore_random_state(state: Mapping[str, Tensor], devices: Sequence[torch.device] = ()) -> None:
    """Put all generators of this process back as captured; those that `state` lacks stay as they are."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, cached = state["numpy_rest"].tolist()
    np.random.set_state(
        ("MT19937", state["numpy_keys"].numpy().astype(np.uint32), int(position), int(has_gauss), cached)
    )
    torch.default_generator.set_state(state["torch"])
    for name, generator in _generators(tuple(devices)).items():
        # the first device's had no number once
        saved = state.get(name, state.get(name.removesuffix("0")))
        if saved is not None:
            generator.set_state(saved)


@functools.cache
def _generators(devices: tuple[torch.device, ...]) -> dict[str, torch.Generator]:
    """Return the generators of the accelerators, under the names of their states: `cuda0`, `cuda1`, …."""
    return {f"{d.type}{number}": default_generator(d) for number, d in enumerate(drawing_devices(devices))}


class _Kept:
    """A tensor of some numbers, made again when they are others.

    They are compared by a hash of 64 bits, which the numbers before need not be read for.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._hash: int | None = None
        self._tensor = torch.empty(0)

    def __call__(self, numbers: Any) -> Tensor:
        if (found := hash(numbers)) != self._hash:
            self._hash, self._tensor = found, torch.from_numpy(self._make(numbers))
        return self._tensor


class _NumpyState:
    """State of NumPy's global generator, asked for only after a draw: NumPy takes 100 us to tell it.

    A draw changes its key or its position in the key, which are read where they lie. The second of a pair of normal
    numbers is given out without a draw, so as long as there is one the whole state is asked for.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None
        self._bytes = b""
        self._has_second = True
        self._tensors = torch.empty(0), torch.empty(0)

    def now(self) -> tuple[Tensor, Tensor]:
        """Return the key, and position, whether there is a second normal number, and that number."""
        generator = np.random.mtrand.get_bit_generator()
        if type(generator) is not np.random.MT19937:
            raise TaskInvalid(
                f"numpy's global generator is {type(generator).__name__}, whose state no checkpoint keeps: leave "
                "np.random.set_bit_generator out, and draw from a generator of your own"
            )
        if generator is not self._generator:
            self._generator = generator
            self._memory = (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address)
        found = self._memory.raw
        if found != self._bytes or self._has_second:
            _, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
            self._tensors = torch.from_numpy(keys.astype(np.int64)), torch.tensor(rest, dtype=torch.float64)
            self._bytes, self._has_second = found, bool(rest[1])
        return self._tensors


_MT19937_BYTES = 625 * 4
"""A key of 624 numbers, and the position in it."""
_python_words = _Kept(lambda numbers: np.array((numbers[0], *numbers[1]), dtype=np.int64))
_python_gauss = _Kept(lambda numbers: np.array(numbers, dtype=np.float64))
_numpy_state = _NumpyState()
