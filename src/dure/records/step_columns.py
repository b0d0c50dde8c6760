"""Step records as columns, for readers of whole runs: a million lines take seconds and not minutes."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic_core

from dure.records.jsonl import MOST_LINE_BYTES, parse_line
from dure.records.step_record import BACKWARD

COLUMNS = (
    *("step", "time", "data_seconds", "forward_backward_seconds", "sync_seconds", "optimizer_seconds"),
    *("wall_seconds", "sent_bytes"),
)
"""Fields of a step record that become columns; all are numbers."""
_MOST_STEPS = 2**53
MOST_MEASURED = 64
"""Maximum number of measurements that are read; no strategy has so many."""
_BLOCK_BYTES = 2**22
"""Bytes of lines that are parsed together."""


@dataclass(frozen=True, kw_only=True)
class StepColumns:
    """Step records of one rank, each step once, in the order of the steps."""

    values: dict[str, np.ndarray]
    """Array `(S,)` of float64 for each of the columns; NaN in steps that lack `backward_seconds`."""
    measured: dict[str, np.ndarray]
    """Array `(S,)` of float64 for each measurement specific to the strategy, NaN in steps without it; none if they were
    not asked for.
    """
    num_left_out: int
    """Number of lines that are no step records."""

    @property
    def steps(self) -> np.ndarray:
        """Numbers of the steps, `(S,)` int64."""
        return self.values["step"].astype(np.int64)


def read_columns(path: Path, columns: Sequence[str] = COLUMNS, *, with_measured: bool = False) -> StepColumns:
    """Read the step records of one rank.

    Of a step that was repeated after a restart, the last record is kept: its times are those of the step that counts.

    Args:
        path: Path of the file; one that does not exist has no steps.
        columns: Fields to read, all of them numbers, the first one `step`.
        with_measured: Whether to read `measured` too.
    """
    blocks, measured = [np.empty((0, len(columns)))], [_Measured(0)]
    num_left_out = 0
    for lines in _blocks_of_lines(path):
        records, rows, left = rows_of_lines(lines, columns)
        blocks.append(rows)
        num_left_out += left
        if with_measured:
            measured.append(_Measured.of(records))
    table = np.concatenate(blocks)
    # of equal steps `unique` returns the first, so the order is reversed
    _, last = np.unique(table[::-1, 0], return_index=True)
    return StepColumns(
        values=dict(zip(columns, table[::-1][last].T, strict=True)),
        measured={name: values[::-1][last] for name, values in _Measured.joined(measured).items()},
        num_left_out=num_left_out,
    )


class _Measured:
    """Measurements of some steps: arrays of float64 by name, NaN where a step has none."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.by_name: dict[str, np.ndarray] = {}

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> "_Measured":
        """Return the measurements in records; values that are no numbers count as none."""
        found = cls(len(records))
        for index, record in enumerate(records):
            of_step = record.get("measured")
            for name, value in of_step.items() if isinstance(of_step, dict) else ():
                is_known = name in found.by_name or len(found.by_name) < MOST_MEASURED
                if is_known and isinstance(value, int | float) and abs(value) <= sys.float_info.max:
                    found.by_name.setdefault(name, np.full(found.num_steps, np.nan))[index] = value
        return found

    @staticmethod
    def joined(blocks: "Sequence[_Measured]") -> dict[str, np.ndarray]:
        """Return the measurements of successive blocks of steps."""
        names = [*dict.fromkeys(name for block in blocks for name in block.by_name)][:MOST_MEASURED]
        return {
            name: np.concatenate([block.by_name.get(name, np.full(block.num_steps, np.nan)) for block in blocks])
            for name in names
        }


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


def rows_of_lines(lines: Sequence[bytes], columns: Sequence[str]) -> tuple[list[Any], np.ndarray, int]:
    """Return the records of some lines, their rows, `(N, C)`, and the number of lines that have none.

    Args:
        lines: Lines of a file of step records.
        columns: Fields to read, all of them numbers, the first one `step`.
    """
    try:
        records = pydantic_core.from_json(b"[" + b",".join(lines) + b"]")
        return records, _table(records, columns), 0
    except (ValueError, TypeError, KeyError, OverflowError):
        pass  # one of them is damaged
    found, tables, num_left_out = [], [np.empty((0, len(columns)))], 0
    for line in lines:
        record = parse_line(line)
        try:
            tables.append(_table([record], columns))
            found.append(record)
        except (ValueError, TypeError, KeyError, OverflowError):
            num_left_out += 1
    return found, np.concatenate(tables), num_left_out


def _table(records: Sequence[Any], columns: Sequence[str]) -> np.ndarray:
    """Return records as rows.

    Raises:
        ValueError: A value is not finite, or no number, or that of the step is none of a step.
        TypeError: A record is no object, or a value is neither a number nor a text.
        KeyError: A record lacks a field.
    """
    has_optional = BACKWARD in columns
    if has_optional:
        records = [{BACKWARD: math.nan, **record} for record in records]
    table = np.array([[record[name] for name in columns] for record in records], dtype=object).astype(np.float64)
    if table.ndim > 2:
        raise ValueError("a value is a list")
    table = table.reshape(-1, len(columns))
    is_known = np.isfinite(table)
    if has_optional:
        is_known[:, columns.index(BACKWARD)] = True
    if not is_known.all():
        raise ValueError("a value is not finite")
    steps = table[:, 0]
    if not ((steps >= 0) & (steps < _MOST_STEPS) & (steps % 1 == 0)).all():
        raise ValueError("a step has no number that can be counted to")
    return table
