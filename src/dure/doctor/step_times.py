"""Times of a run's steps on all ranks, for a diagnosis of what makes them slow."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dure.records.run_dir import RunDir
from dure.records.step_columns import StepColumns, read_columns
from dure.records.step_record import PARTS

MOST_MISSING = 9
_NUM_FIRST = 5
"""Steps at the start that are left out: caches, allocators and buckets are set up in them."""
_MOST_OUT_OF_STEP = 1.1
_PAUSE_SECONDS = 30.0
_MOST_SECONDS = 1e6
_MOST_MEASURED = 1e15
"""A damaged record may have impossible values."""
_PAUSE_FACTOR = 20.0
"""A step with more seconds, and more than this multiple of the median, is a pause (a suspended laptop): left out."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of each part of each step on each rank, of the steps that all ranks have recorded."""

    ranks: tuple[int, ...]
    steps: np.ndarray
    """Numbers of the steps, `(S,)`."""
    seconds: dict[str, np.ndarray]
    """Array `(R, S)` for each of `PARTS`, for `other` and for `wall`."""
    sent_bytes: np.ndarray
    """Bytes that each rank sent in each step, `(R, S)`."""
    measured: tuple[Mapping[str, np.ndarray], ...]
    """Further measurements of each rank, of all its steps, NaN in those without; empty if they were not read."""
    num_left_out: int
    """Number of lines in the records that are not step records."""
    recorded_fraction: float
    """Fraction of the steps of the longest records that all ranks have; others end early if a rank was lost."""
    missing: tuple[int, ...]
    """Ranks without step records, `MOST_MISSING` of them at most."""

    @property
    def wall(self) -> np.ndarray:
        """Seconds of each step, `(S,)`, on the rank that took longest for all: ranks need not be in step."""
        walls = self.seconds["wall"]
        longest: np.ndarray = walls[walls.sum(axis=1).argmax()] if self.ranks else np.empty(0)
        return longest

    @property
    def are_in_step(self) -> bool:
        """True if each step takes the ranks equally long, because they wait for each other in it."""
        return bool(self.seconds["wall"].max(axis=0).mean() <= _MOST_OUT_OF_STEP * self.wall.mean())

    def sums(self, name: str) -> np.ndarray:
        """Return the sum of a measurement on each rank, `(R,)`."""
        return np.array([values.sum() for values in self._known(name)])

    def means(self, name: str) -> np.ndarray:
        """Return the mean of a measurement on each rank, `(R,)`; 0 on one that did not make it."""
        return np.array([values.mean() if values.size else 0.0 for values in self._known(name)])

    def most(self, name: str) -> int:
        """Return the number of steps in which a rank measured something, of the rank with the most."""
        return max((values.size for values in self._known(name)), default=0)

    def mean_of(self, name: str) -> float | None:
        """Return the mean of a measurement over all ranks and steps; None if it was not made."""
        values = np.concatenate([np.empty(0), *self._known(name)])
        return float(values.mean()) if values.size else None

    def largest(self, name: str) -> float | None:
        """Return the largest value of a measurement that all ranks made, zeros included; None if one did not."""
        found = [values[~np.isnan(values)] for values in (rank.get(name, np.empty(0)) for rank in self.measured)]
        return max(float(values.max()) for values in found) if found and all(map(np.size, found)) else None

    def _known(self, name: str) -> list[np.ndarray]:
        """Return the values of a measurement on each rank in the steps that have some."""
        found = [rank.get(name, np.empty(0)) for rank in self.measured]
        return [values[(values > 0) & (values < _MOST_MEASURED)] for values in found]

    @property
    def busy(self) -> np.ndarray:
        """Seconds that each rank spent in each step on anything but waiting for other ranks, `(R, S)`."""
        left: np.ndarray = self.seconds["wall"] - self.seconds["sync"]
        return left


def step_times(run: RunDir, world_size: int, first_step: int, *, with_measured: bool = False) -> StepTimes:
    """Return the times of the steps of a run's last attempt, without the first ones and without pauses.

    Args:
        run: The run.
        world_size: Number of ranks.
        first_step: Number of the step at which the attempt began; earlier ones may have been computed on other ranks.
        with_measured: Whether to read what ranks measured in addition.
    """
    ranks = [rank for rank in run.recorded_ranks() if rank < world_size]
    columns = {rank: read_columns(run.records_path(rank), with_measured=with_measured) for rank in ranks}
    recorded = {rank: found for rank, found in columns.items() if found.steps.size}
    steps = _common_steps([*recorded.values()], first_step)
    rows = {rank: np.searchsorted(found.steps, steps) for rank, found in recorded.items()}

    def table(name: str) -> np.ndarray:
        picked = [found.values[name][rows[rank]] for rank, found in recorded.items()]
        return np.stack(picked) if picked else np.empty((0, 0))

    seconds = {part: table(f"{part}_seconds") for part in (*PARTS, "wall")}
    seconds["other"] = np.maximum(seconds["wall"] - sum(seconds[part] for part in PARTS), 0.0)
    wall = seconds["wall"].max(axis=0) if steps.size else np.empty(0)
    is_usual = wall <= max(_PAUSE_SECONDS, _PAUSE_FACTOR * (np.median(wall) if wall.size else 0.0))
    if steps.size:  # a damaged record may have impossible times
        parts = np.stack([seconds[part] for part in (*PARTS, "wall")])
        is_usual &= (
            (parts[-1] > 0).all(axis=0) & (parts >= 0).all(axis=(0, 1)) & (parts < _MOST_SECONDS).all(axis=(0, 1))
        )
    is_usual[:_NUM_FIRST] = False
    longest = max((int((found.steps > first_step).sum()) for found in recorded.values()), default=0)
    return StepTimes(
        ranks=tuple(recorded),
        steps=steps[is_usual],
        seconds={part: values[:, is_usual] for part, values in seconds.items()},
        sent_bytes=table("sent_bytes")[:, is_usual],
        measured=tuple(found.measured for found in recorded.values()),
        num_left_out=sum(found.num_left_out for found in columns.values()),
        recorded_fraction=steps.size / longest if longest else 1.0,
        missing=tuple(islice((rank for rank in range(world_size) if rank not in recorded), MOST_MISSING)),
    )


def _common_steps(columns: list[StepColumns], first_step: int) -> np.ndarray:
    """Return the numbers of the steps after the first one that all ranks have, `(S,)`."""
    if not columns:
        return np.empty(0, dtype=np.int64)
    steps = columns[0].steps
    for found in columns[1:]:
        steps = np.intersect1d(steps, found.steps, assume_unique=True)
    return steps[steps > first_step]
