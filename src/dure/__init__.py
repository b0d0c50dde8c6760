"""dure (두레): train a PyTorch model on one device or on many, with the same result."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.api import evaluate, export, train
    from dure.errors import DureError, EnvironmentLacks, Interrupted, Misuse, WorkerFailed
    from dure.measure.records import Metric, RunSummary, StepRecord
    from dure.measure.sums import Sum
    from dure.spec import RunSpec
    from dure.training.task import Task

# Where each public name lives. They are imported when first used, so that `dure --help` need not import torch.
_HOMES = {
    "Task": "dure.training.task",
    "Sum": "dure.measure.sums",
    "train": "dure.api",
    "evaluate": "dure.api",
    "export": "dure.api",
    "RunSpec": "dure.spec",
    "RunSummary": "dure.measure.records",
    "StepRecord": "dure.measure.records",
    "Metric": "dure.measure.records",
    "DureError": "dure.errors",
    "Misuse": "dure.errors",
    "EnvironmentLacks": "dure.errors",
    "WorkerFailed": "dure.errors",
    "Interrupted": "dure.errors",
}

__all__ = [
    "DureError",
    "EnvironmentLacks",
    "Interrupted",
    "Metric",
    "Misuse",
    "RunSpec",
    "RunSummary",
    "StepRecord",
    "Sum",
    "Task",
    "WorkerFailed",
    "evaluate",
    "export",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dure' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
