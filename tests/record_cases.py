"""Records for tests that need one and care about few of its fields."""

from typing import Any

from dure.failures.record import CodeLine, FailureRecord
from dure.records.step_record import StepRecord, step_line

LINE = CodeLine(file="train.py", line=7, function="main", text="raise ValueError")


def failure_of(rank: int = 0, **fields: Any) -> FailureRecord:
    usual = {
        "rank": rank, "host": "host-a", "pid": 1, "time": 1.0, "step": 4, "type": "ValueError", "message": "seen",
        "exit_code": 1, "is_ours": False, "is_misuse": False, "is_consequence": False, "user_line": None,
        "user_traceback": None, "traceback": "Traceback (most recent call last)",
    }  # fmt: skip
    return FailureRecord(**{**usual, **fields})


def step_of(**fields: Any) -> StepRecord:
    usual = {
        "time": 1.75e9, "step": 1, "epoch": 0, "samples_seen": 64, "loss_sum": 1.5, "loss_count": 64,
        "data_seconds": 0.1, "forward_backward_seconds": 0.2, "sync_seconds": 0.3, "optimizer_seconds": 0.4,
        "wall_seconds": 1.0, "sent_bytes": 8,
    }  # fmt: skip
    return StepRecord(**{**usual, **fields})


def step_lines(*samples_seen: int) -> str:
    """Return the lines of a record file whose steps ended at these positions."""
    steps = enumerate(samples_seen, 1)
    return "".join(step_line(step_of(step=number, samples_seen=seen)) for number, seen in steps)
