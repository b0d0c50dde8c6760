"""Trainings that go on after a failed collective: `run`, states and a sampler that continues an epoch."""

from collections.abc import Callable
from typing import Any

from dure.compat.horovod.common.elastic import ObjectState, State, run_fn
from dure.compat.horovod.torch.elastic.sampler import ElasticSampler
from dure.compat.horovod.torch.elastic.state import TorchState
from dure.compat.horovod.torch.mpi_ops import init, shutdown


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts `func(state, ...)` again after a failed collective, from the last commit."""
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()


__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
