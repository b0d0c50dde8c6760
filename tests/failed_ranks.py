"""Failure records for tests that need one and care about few of its fields."""

from typing import Any

from dure.failures.record import CodeLine, FailureRecord

LINE = CodeLine(file="train.py", line=7, function="main", text="raise ValueError")


def failure_of(rank: int = 0, **fields: Any) -> FailureRecord:
    usual = {
        "rank": rank, "host": "host-a", "pid": 1, "time": 1.0, "step": 4, "type": "ValueError", "message": "seen",
        "exit_code": 1, "is_ours": False, "is_misuse": False, "is_consequence": False, "user_line": None,
        "user_traceback": None, "traceback": "Traceback (most recent call last)",
    }  # fmt: skip
    return FailureRecord(**{**usual, **fields})
