"""Step records as columns, for readers of whole runs: a million lines take seconds and not minutes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic_core

from dure.records.jsonl import MOST_LINE_BYTES, parse_line

COLUMNS = (
    *("step", "time", "data_seconds", "forward_backward_seconds", "sync_seconds", "optimizer_seconds"),
    *("wall_seconds", "sent_bytes"),
)
"""Fields of a step record that become columns; all are numbers."""
_MOST_STEPS = 2**53
_BLOCK_BYTES = 2**22
"""Bytes of lines that are parsed together."""


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """Step records of one rank, each step once, in the order of the steps."""

    values: dict[str, np.ndarray]
    """Array `(S,)` of float64 for each of `COLUMNS`."""
    num_left_out: int
    """Number of lines that are no step records."""

    @property
    def steps(self) -> np.ndarray:
        """Numbers of the steps, `(S,)` int64."""
        return self.values["step"].astype(np.int64)


def read_columns(path: Path) -> StepColumns:
    """Read the step records of one rank.

    Of a step that was repeated after a restart, the last record is kept: its times are those of the step that counts.

    Args:
        path: Path of the file; one that does not exist has no steps.
    """
    blocks, num_left_out = [np.empty((0, len(COLUMNS)))], 0
    for lines in _blocks_of_lines(path):
        rows, left = _rows(lines)
        blocks.append(rows)
        num_left_out += left
    table = np.concatenate(blocks)
    # of equal steps `unique` returns the first, so the order is reversed
    _, last = np.unique(table[::-1, 0], return_index=True)
    table = table[::-1][last]
    return StepColumns(values=dict(zip(COLUMNS, table.T, strict=True)), num_left_out=num_left_out)


def _blocks_of_lines(path: Path) -> Iterator[list[bytes]]:
    """Yield the lines of a file, some megabytes at a time."""
    if not path.is_file():
        return
    lines: list[bytes] = []
    num_bytes = 0
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            if not line.isspace():
                lines.append(line)
                num_bytes += len(line)
            if num_bytes >= _BLOCK_BYTES:
                yield lines
                lines, num_bytes = [], 0
    yield lines


def _rows(lines: Sequence[bytes]) -> tuple[np.ndarray, int]:
    """Return the rows of some lines, `(N, C)`, and the number of lines that have none."""
    try:
        return _table(pydantic_core.from_json(b"[" + b",".join(lines) + b"]")), 0
    except (ValueError, TypeError, KeyError, OverflowError):
        pass  # one of them is damaged
    tables, num_left_out = [np.empty((0, len(COLUMNS)))], 0
    for line in lines:
        record = parse_line(line)
        try:
            tables.append(_table([record]))
        except (ValueError, TypeError, KeyError, OverflowError):
            num_left_out += 1
    return np.concatenate(tables), num_left_out


def _table(records: Sequence[Any]) -> np.ndarray:
    """Return records as rows.

    Raises:
        ValueError: A value is not finite, or no number, or that of the step is none of a step.
        TypeError: A record is no object, or a value is neither a number nor a text.
        KeyError: A record lacks a field.
    """
    table = np.array([[record[name] for name in COLUMNS] for record in records], dtype=object).astype(np.float64)
    if table.ndim > 2:
        raise ValueError("a value is a list")
    table = table.reshape(-1, len(COLUMNS))
    if not np.isfinite(table).all():
        raise ValueError("a value is not finite")
    steps = table[:, 0]
    if not ((steps >= 0) & (steps < _MOST_STEPS) & (steps % 1 == 0)).all():
        raise ValueError("a step has no number that can be counted to")
    return table
