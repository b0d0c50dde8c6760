"""One seed for everything that draws."""

import functools
import os
import random
from typing import Any

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
    """Return the state of all generators of this process as tensors."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    state = {
        "python": _as_tensor((version, *words)),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_keys": torch.from_numpy(numpy_state[1].astype(np.int64)),
        "numpy_rest": torch.tensor([numpy_state[2], numpy_state[3], numpy_state[4]], dtype=torch.float64),
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    elif torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


@functools.lru_cache(maxsize=1)
def _as_tensor(words: tuple[int, ...]) -> Tensor:
    """Return 626 numbers as a tensor: kept, for from step to step few runs draw from Python's own generator."""
    return torch.from_numpy(np.array(words, dtype=np.int64))


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
