"""Records of how a rank has used its machine: a line of `usage<r>.jsonl` every few seconds."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dure.checked import Count, Text, Time, record_from_json
from dure.documents import DocumentInvalid
from dure.host.usage import GpuUse, ProcessUse
from dure.records.jsonl import read_lines
from dure.records.run_dir import RunDir

MOST_GPUS = 64
_TAIL_BYTES = 2**18
"""Bytes at the end of a file that are read: some hours of a rank, whatever the length of the run."""
_Amount = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRecord:
    """Recorded `GpuUse`."""

    device: Count
    busy: _Amount | None = None
    memory_bytes: Count | None = None
    watts: _Amount | None = None
    most_watts: _Amount | None = None
    megahertz: _Amount | None = None
    most_megahertz: _Amount | None = None
    slowed_by: tuple[Text, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageRecord:
    """Use of the machine by one rank since the record before."""

    time: Time
    """Seconds since the epoch."""
    cores: _Amount
    """Mean number of cores that the rank's own process used."""
    resident_bytes: Count
    loaders: Count
    """Number of processes that it has started."""
    loader_cores: _Amount
    loader_bytes: Count
    gpus: tuple[GpuRecord, ...] = ()


def usage_path(run: RunDir, rank: int) -> Path:
    """Return the path of a rank's records of use."""
    return run.path / f"usage{rank}.jsonl"


def usage_line(time: float, process: ProcessUse, gpus: tuple[GpuUse, ...]) -> str:
    """Return a line of JSON."""
    return json.dumps({"time": time, **asdict(process), "gpus": [asdict(gpu) for gpu in gpus]}) + "\n"


def read_usage(run: RunDir, rank: int, since: float = 0.0) -> Iterator[UsageRecord]:
    """Yield the newest records of a rank, of the last hours and from a time on; damaged lines are left out."""
    path = usage_path(run, rank)
    begin = max(0, path.stat().st_size - _TAIL_BYTES) if path.is_file() else 0
    for line in read_lines(path, begin):  # the first may be the end of one, and is then damaged
        try:
            record = record_from_json(UsageRecord, {**line, "gpus": tuple(line.get("gpus", ()))[:MOST_GPUS]})
        except (DocumentInvalid, TypeError):
            continue
        if record.time >= since:
            yield record
