"""dure (두레): train a PyTorch model on one device or on many, with the same result."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.api.train import evaluate, export, train
    from dure.errors import DureError, EnvironmentLacks, Interrupted, Misuse, WorkerFailed
    from dure.records.step_record import Metric, RunSummary, StepRecord
    from dure.records.sums import Sum
    from dure.spec import RunSpec
    from dure.training.task.task import Task

# Module of each public name. They are imported on first use, so that `dure --help` need not import torch.
_HOMES = {
    "Task": "dure.training.task.task",
    "Sum": "dure.records.sums",
    "train": "dure.api.train",
    "evaluate": "dure.api.train",
    "export": "dure.api.train",
    "RunSpec": "dure.spec",
    "RunSummary": "dure.records.step_record",
    "StepRecord": "dure.records.step_record",
    "Metric": "dure.records.step_record",
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
