"""Records of a run as tables in files of other programs: CSV, Parquet."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from dure.errors import EnvironmentLacks, Misuse
from dure.records.events import Evaluated, Training
from dure.records.run_dir import RunDir, os_errors_as_sentences
from dure.records.step_columns import MOST_MEASURED, read_columns
from dure.records.step_record import StepRecord
from dure.report.whole_file import written_whole
from dure.terminal import printable

TRACE = ".json"
"""Ending of a timeline, which is no table."""
_WHOLE = ("step", "epoch", "samples_seen", "sent_bytes")
_MOST_WHOLE = 2.0**63
_MOST_MISSING = 64
_STEP_COLUMNS = ("step", *(name for name in StepRecord._fields if name not in ("step", "samples", "measured")))


@dataclass(frozen=True, kw_only=True)
class RecordTable:
    """Table of a run's records."""

    columns: Mapping[str, np.ndarray]
    """Array `(N,)` of float64, int64 or bool for each column; NaN where a row has no value."""
    num_left_out: int
    """Number of lines in the records that have no row, because they are damaged."""
    missing: tuple[int, ...] = ()
    """Ranks of the last attempt without a file of records, the first ones of them."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))


def steps_table(run: RunDir) -> RecordTable:
    """Return the steps of all ranks, a row for each step and rank, those of rank 0 first.

    Of a step that was repeated after a restart, the last record is kept. The columns are the fields of `StepRecord`
    without `samples`, the mean loss, and `measured.NAME` for what a strategy measures.
    """
    ranks = run.recorded_ranks()
    found = [read_columns(run.records_path(rank), _STEP_COLUMNS, with_measured=True) for rank in ranks]
    sizes = [each.steps.size for each in found]
    columns = {"rank": np.repeat(np.array(ranks, dtype=np.int64), sizes)}
    for name in _STEP_COLUMNS:
        values = np.concatenate([np.empty(0), *(each.values[name] for each in found)])
        is_whole = name in _WHOLE and bool((np.abs(values) < _MOST_WHOLE).all())
        columns[name] = values.astype(np.int64) if is_whole else values
    count = columns["loss_count"]
    columns["loss"] = np.divide(columns["loss_sum"], count, out=np.full(len(count), np.nan), where=count != 0)
    measured = sorted(set(chain.from_iterable(each.measured for each in found)))
    for name in measured[:MOST_MEASURED]:
        parts = [each.measured.get(name, np.full(size, np.nan)) for each, size in zip(found, sizes, strict=True)]
        columns[f"measured.{printable(name)}"] = np.concatenate(parts)
    attempts = [event for event in run.events() if isinstance(event, Training)]
    absent = (rank for rank in range(attempts[-1].world_size if attempts else 0) if rank not in ranks)
    return RecordTable(
        columns=columns,
        num_left_out=sum(each.num_left_out for each in found),
        missing=tuple(islice(absent, _MOST_MISSING)),
    )


def evaluations_table(run: RunDir) -> RecordTable:
    """Return the evaluations during training, a row for each, with `metric.NAME` and the number of what it counts.

    An evaluation that was repeated after a restart has a row for each time.
    """
    events = [event for event in run.events() if isinstance(event, Evaluated)]

    def column(get: Callable[[Evaluated], float | None], dtype: type = np.float64) -> np.ndarray:
        return np.array([math.nan if (value := get(event)) is None else value for event in events], dtype=dtype)

    columns = {
        "time": column(lambda event: event.time),
        "step": column(lambda event: event.step, np.int64),
        "epochs": column(lambda event: event.epochs),
        "samples_seen": column(lambda event: event.samples_seen, np.int64),
        "train_loss": column(lambda event: event.train_loss),
        "is_best": column(lambda event: event.is_best, np.bool_),
        "seconds": column(lambda event: event.seconds),
    }
    for name in dict.fromkeys(chain.from_iterable(event.metrics for event in events)):
        of_name = [event.metrics.get(name) for event in events]
        title = printable(name)  # which is text that every encoding has
        columns[f"metric.{title}"] = np.array([math.nan if one is None else one.value for one in of_name], dtype=float)
        columns[f"count.{title}"] = np.array([math.nan if one is None else one.count for one in of_name], dtype=float)
    return RecordTable(columns=columns, num_left_out=0)


TABLES: Mapping[str, Callable[[RunDir], RecordTable]] = {"steps": steps_table, "evaluations": evaluations_table}


def read_table(run: RunDir, name: str) -> RecordTable:
    """Return one of `TABLES`.

    Raises:
        RunInvalid: The records cannot be read.
    """
    with os_errors_as_sentences(run.path, "read"), run.understood():
        return TABLES[name](run)


def check_file(path: Path) -> None:
    """Refuse, before anything is read, a file that could not be written.

    Raises:
        Misuse: The ending is not supported, or the folder does not exist.
        EnvironmentLacks: pyarrow is not installed, and the file is Parquet.
    """
    if path.suffix not in (*_WRITERS, TRACE):
        ending = f"has the ending {path.suffix}" if path.suffix else "has no ending"
        raise Misuse(f"{path} {ending}: use one of {', '.join((*_WRITERS, TRACE))}")
    if not path.parent.is_dir():
        raise Misuse(f"{path}: there is no folder {path.parent}; make it first")
    if path.suffix == ".parquet":
        try:
            import pyarrow  # noqa: F401
        except ModuleNotFoundError:
            raise EnvironmentLacks(
                "pyarrow is not installed, but writes Parquet: pip install 'dure[parquet]', or write .csv"
            ) from None


def write_table(table: RecordTable, path: Path) -> None:
    """Write a table into a file that appears completely or not at all; an existing file is replaced.

    Raises:
        Misuse: The system refuses the file.
    """
    with written_whole(path) as new:
        _WRITERS[path.suffix](table.columns, new)


def _write_csv(columns: Mapping[str, np.ndarray], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*map(_cells, columns.values()), strict=True))


def _cells(values: np.ndarray) -> Sequence[Any]:
    """Return values as Python's, with the empty text for NaN."""
    found: list[Any] = values.tolist()
    if values.dtype == np.float64:
        for index in np.flatnonzero(np.isnan(values)):
            found[index] = ""
    return found


def _write_parquet(columns: Mapping[str, np.ndarray], path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({name: pa.array(values, from_pandas=True) for name, values in columns.items()})
    parquet.write_table(table, path)


_WRITERS: Mapping[str, Callable[[Mapping[str, np.ndarray], Path], None]] = {
    ".csv": _write_csv,
    ".parquet": _write_parquet,
}
