"""States of random number generators that objects own, as plain values."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def generator_state(generator: Any) -> Any:
    """Return the state of a random number generator, of torch, NumPy or Python, as plain values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=False)
        return _plain(state)
    return _plain(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the state of a generator to a result of `generator_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_with_arrays(state))
    else:
        generator.bit_generator.state = _with_arrays(state)


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    return {"array": state.tolist(), "dtype": str(state.dtype)} if isinstance(state, np.ndarray) else state


def _with_arrays(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if state.keys() == {"array", "dtype"}:
        return np.array(state["array"], dtype=state["dtype"])
    return {key: _with_arrays(value) for key, value in state.items()}
