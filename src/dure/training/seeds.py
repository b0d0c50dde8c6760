"""Seeds of all random number generators, derived from one seed."""

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
from dure.host.device_kinds import device_kind
from dure.torchcompat.devices import default_generator


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy, torch and all accelerators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Seed this rank's own draws (dropout): different on every rank, the same in every run."""
    seed_everything(mix(seed, 0x72616E6B, rank) >> 1)


def make_deterministic() -> None:
    """Make torch use algorithms that give the same bits every time."""
    # cuBLAS reads it when its first handle is created
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def chosen_by_timing(device_type: str, step: int) -> list[str]:
    """Return declarations for a continued run in which each start selects algorithms by timing.

    Args:
        device_type: Type of the run's devices.
        step: Step after which the run continues; 0 for a new run.
    """
    if not device_kind(device_type).times_convolutions or not step or not torch.backends.cudnn.benchmark:
        return []
    return [
        "the bits of convolutions after a resume or restart: cuDNN times its algorithms anew at each start and takes "
        "the fastest (--deterministic, or torch.backends.cudnn.benchmark = False in build_model, switches that off)"
    ]


def capture_random_state(devices: Sequence[torch.device] = ()) -> dict[str, Tensor]:
    """Return the state of all generators of this process as tensors, which must not be changed.

    While a generator draws nothing, its tensors are the same objects: few runs draw from Python's or NumPy's generators
    in each step.

    Args:
        devices: Devices of this process. Accelerators are numbered in this order, because the next start may use
            others.

    Raises:
        TaskInvalid: NumPy's global generator is of a type that checkpoints do not support.
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
    """Restore all generators of this process as captured; those that `state` lacks are left alone."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss, cached = state["numpy_rest"].tolist()
    np.random.set_state(
        ("MT19937", state["numpy_keys"].numpy().astype(np.uint32), int(position), int(has_gauss), cached)
    )
    torch.default_generator.set_state(state["torch"])
    for name, generator in _generators(tuple(devices)).items():
        # older states have no number for the first device
        saved = state.get(name, state.get(name.removesuffix("0")))
        if saved is not None:
            generator.set_state(saved)


@functools.cache
def _generators(devices: tuple[torch.device, ...]) -> dict[str, torch.Generator]:
    """Return the generators of the accelerators, by the names of their states: `cuda0`, `cuda1`, …."""
    return {f"{d.type}{number}": default_generator(d) for number, d in enumerate(drawing_devices(devices))}


class _Kept:
    """Tensor of some numbers, created again when they change.

    They are compared by their 64-bit hash, which avoids reading the earlier numbers.
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
    """State of NumPy's global generator, queried only after a draw, because NumPy takes 100 us to return it.

    A draw changes its key or its position in the key, which are read directly from memory. The second of a pair of
    normal numbers is returned without a draw, so the whole state is queried while there is one.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None
        self._bytes = b""
        self._has_second = True
        self._tensors = torch.empty(0), torch.empty(0)

    def now(self) -> tuple[Tensor, Tensor]:
        """Return two tensors: the key; and the position, whether there is a second normal number, and that number."""
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
"""Bytes of a key of 624 numbers and the position in it."""
_python_words = _Kept(lambda numbers: np.array((numbers[0], *numbers[1]), dtype=np.int64))
_python_gauss = _Kept(lambda numbers: np.array(numbers, dtype=np.float64))
_numpy_state = _NumpyState()
