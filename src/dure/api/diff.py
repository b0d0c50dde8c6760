"""Comparison of two runs by their records: settings, samples, losses and weights."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dure.errors import CheckpointDamaged, CheckpointMismatch, RunInvalid
from dure.records.run_dir import RunDir
from dure.records.step_record import StepRecord
from dure.spec import PLACE_FIELDS
from dure.terminal import print_status
from dure.torchcompat.tensors import bytes_of
from dure.training.checkpoints.reader import Checkpoint
from dure.training.checkpoints.store import CheckpointStore

Steps = list[dict[int, StepRecord]]
"""Steps of both runs, by number."""


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """First step whose mean losses differ."""

    step: int
    losses: tuple[float | None, float | None]
    relative: float
    """Difference as a fraction of the greater of the two losses."""


@dataclass(frozen=True, kw_only=True)
class WeightsDifference:
    """Difference between two checkpoints of one position."""

    samples_seen: int
    steps: tuple[int, int]
    """Completed steps of each run at this position."""
    largest: float
    """Maximum absolute difference over all elements of all tensors. Infinite if a tensor is missing or has another
    shape, or if an element is NaN or infinite in only one checkpoint."""
    relative: float
    """Maximum difference as a fraction of the largest finite element of that tensor."""
    tensor: str | None
    """Tensor with the maximum difference; None if the checkpoints are bitwise identical."""
    num_nan: int
    """Number of elements that are NaN in both. They count as equal with a tolerance; without one, their bits must
    match."""

    def is_apart(self, tolerance: float) -> bool:
        """Return whether they differ in any bit, or by more than a relative tolerance."""
        return self.tensor is not None and (tolerance == 0 or not self.relative <= tolerance)


@dataclass(frozen=True, kw_only=True)
class DamagedCheckpoint:
    """Checkpoint that could not be compared."""

    run: str
    checkpoint: str
    reason: str
    """Sentence that names it and the damage."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between two runs: what they have in common, and the first step at which they diverge."""

    runs: tuple[str, str]
    tolerance: float
    """Relative difference of losses and weights that counts as equal; 0 to compare every bit."""
    settings: dict[str, tuple[Any, Any]]
    """Values of the settings that differ, by name."""
    steps: int
    """Number of steps completed by both runs."""
    steps_of_one: tuple[int, int]
    """Numbers of steps completed only by the first and only by the second run."""
    samples_from: int | None
    """First step that used other samples, or ended at another position; None if there is none."""
    has_samples: bool
    """True if both runs recorded the samples of each step; otherwise only their number is compared."""
    losses: LossDifference | None
    steps_without_loss: int
    """Number of steps without a loss in both runs, because both skipped them; that counts as equal."""
    weights: list[WeightsDifference]
    """Differences at every position with complete checkpoints of both runs; at other positions they are unknown."""
    damaged: list[DamagedCheckpoint]
    """Checkpoints that could not be compared because of damage."""

    @property
    def apart(self) -> WeightsDifference | None:
        """First of the compared checkpoints that differ; None if there is none."""
        return next((one for one in self.weights if one.is_apart(self.tolerance)), None)

    @property
    def last_same(self) -> WeightsDifference | None:
        """Last compared checkpoint before `apart`; None if there is none."""
        apart = self.apart
        before = self.weights if apart is None else self.weights[: self.weights.index(apart)]
        return before[-1] if before else None

    @property
    def weights_part(self) -> tuple[int | None, int] | None:
        """Positions in samples between which the weights diverge; the first is None if no earlier one is equal."""
        if self.apart is None:
            return None
        return None if self.last_same is None else self.last_same.samples_seen, self.apart.samples_seen

    @property
    def part_at(self) -> str | None:
        """Text on where the runs diverge; None if they do not."""
        if self.samples_from is not None:
            return f"other samples from step {self.samples_from} on"
        if self.losses is not None:
            return f"other losses from step {self.losses.step} on"
        if self.weights_part is None:
            return None
        before, after = self.weights_part
        same = "the first checkpoint that both have" if before is None else f"where those after {before:,} are the same"
        return f"other weights after {after:,} samples, {same}"

    def to_json(self) -> dict[str, Any]:
        """Return the difference as plain JSON values."""
        return {**asdict(self), "weights_part": self.weights_part, "part_at": self.part_at}


def compare(first: Path, second: Path, *, tolerance: float = 0.0) -> Difference:
    """Compare two runs.

    Args:
        first: Folder of a run.
        second: Folder of another run.
        tolerance: Relative difference up to which losses and weights count as equal, with NaN equal to NaN; 0 to
            compare every bit.

    Raises:
        RunInvalid: There is no such run, or nothing to compare.
    """
    runs = RunDir.open(first), RunDir.open(second)
    specs = [run.read_spec().by_name(exclude=(*PLACE_FIELDS, "trust_task")) for run in runs]
    both = {name: (specs[0].get(name), specs[1].get(name)) for name in {**specs[0], **specs[1]}}
    settings = {name: values for name, values in both.items() if values[0] != values[1]}
    with runs[0].understood(), runs[1].understood():
        steps = [{record.step: record for record in run.records(0)} for run in runs]
        common = sorted(steps[0].keys() & steps[1].keys())
        used = [_samples_by_step(run) for run in runs]
        has_samples = all(samples is not None for samples in used)
        losses, steps_without_loss = _losses(common, steps, tolerance)
        samples_from = _first_of_other_samples(common, steps, used if has_samples else None)
    weights, damaged = _weights(*runs)
    if not common and not weights:
        raise RunInvalid(
            f"{first} and {second} have nothing in common to compare: no step that both have done, and no whole "
            "checkpoint at a position that both have: train one of them further"
        )
    return Difference(
        runs=(str(first), str(second)),
        tolerance=tolerance,
        settings=settings,
        steps=len(common),
        steps_of_one=(len(steps[0]) - len(common), len(steps[1]) - len(common)),
        samples_from=samples_from,
        has_samples=has_samples,
        losses=losses,
        steps_without_loss=steps_without_loss,
        weights=weights,
        damaged=damaged,
    )


def _samples_by_step(run: RunDir) -> dict[int, list[int]] | None:
    found: dict[int, list[int]] = {}
    for path in run.path.glob("rank*.jsonl"):
        for record in run.records(int(path.stem.removeprefix("rank"))):
            if record.samples is None:
                return None
            found.setdefault(record.step, []).extend(record.samples)
    return {step: sorted(samples) for step, samples in found.items()}


def _first_of_other_samples(common: Iterable[int], steps: Steps, used: list[Any] | None) -> int | None:
    for step in common:
        if steps[0][step].samples_seen != steps[1][step].samples_seen:
            return step
        if used is not None and used[0][step] != used[1][step]:
            return step
    return None


def _losses(common: Iterable[int], steps: Steps, tolerance: float) -> tuple[LossDifference | None, int]:
    """Return the first loss that differs, and the number of steps before it without a loss in both runs."""
    num_without = 0
    for step in common:
        one, other = (_mean_loss(of[step]) for of in steps)
        if math.isnan(one) and math.isnan(other):
            num_without += 1
            continue
        relative = _relative(abs(one - other), max(abs(one), abs(other)))
        is_same = one.hex() == other.hex() if tolerance == 0 else relative <= tolerance
        if not is_same:
            return LossDifference(step=step, losses=(one, other), relative=relative), num_without
    return None, num_without


def _mean_loss(record: StepRecord) -> float:
    return float(record.loss_sum / record.loss_count) if record.loss_count else math.nan


def _relative(difference: float, size: float) -> float:
    return difference / size if size and math.isfinite(difference) else difference


def _weights(*runs: RunDir) -> tuple[list[WeightsDifference], list[DamagedCheckpoint]]:
    one, other = (_checkpoints(run) for run in runs)
    found: list[WeightsDifference] = []
    damaged: list[DamagedCheckpoint] = []
    for samples_seen in sorted(one.keys() & other.keys()):
        read = [_read(run, of[samples_seen], damaged) for run, of in zip(runs, (one, other), strict=True)]
        if read[0] is not None and read[1] is not None:
            found.append(_largest_difference(samples_seen, read[0], read[1]))
    return found, damaged


def _checkpoints(run: RunDir) -> dict[int, list[Path]]:
    # the newest first: of several at one position it counts, if it is complete
    found: dict[int, list[Path]] = {}
    for path, samples_seen in CheckpointStore(run.checkpoints, 1, print_status).positions():
        found.setdefault(samples_seen, []).append(path)
    return found


def _read(run: RunDir, paths: list[Path], damaged: list[DamagedCheckpoint]) -> Checkpoint | None:
    """Return the first complete checkpoint, and record those before it as damaged."""
    for path in paths:
        try:
            return Checkpoint.read(path, weights_only=True)
        except (CheckpointDamaged, CheckpointMismatch) as error:
            damaged.append(DamagedCheckpoint(run=str(run.path), checkpoint=path.name, reason=str(error)))
    return None


def _largest_difference(samples_seen: int, first: Checkpoint, second: Checkpoint) -> WeightsDifference:
    one, other = first.weights(), second.weights()
    steps = first.position.step, second.position.step
    worst: tuple[float, float, str | None] = 0.0, 0.0, None
    num_nan = 0
    for name in sorted(one.keys() | other.keys()):
        found, num_nan_here = _difference_of(one.get(name), other.get(name))
        num_nan += num_nan_here
        if found is not None and (worst[2] is None or found[1] > worst[1]):
            worst = *found, name
    return WeightsDifference(
        samples_seen=samples_seen,
        steps=steps,
        largest=worst[0],
        relative=worst[1],
        tensor=worst[2],
        num_nan=num_nan,
    )


def _difference_of(one: Tensor | None, other: Tensor | None) -> tuple[tuple[float, float] | None, int]:
    """Return the maximum absolute and relative difference of two tensors, and the number of elements NaN in both.

    The differences are None if the tensors have the same bits. They are 0 if only bits without effect in arithmetic
    differ, such as those of 0.0 and -0.0.
    """
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return (math.inf, math.inf), 0
    first, second = _as_numbers(one), _as_numbers(other)
    is_nan = first.isnan() & second.isnan()
    num_nan = int(is_nan.sum())
    if torch.equal(bytes_of(one), bytes_of(other)):
        return None, num_nan
    # infinities of one sign are equal, and NaN is infinitely far from them
    apart = (first - second).abs().nan_to_num(nan=math.inf).masked_fill_(is_nan | (first == second), 0.0)
    largest = float(apart.max())
    sizes = (float(numbers.abs().nan_to_num(nan=0.0, posinf=0.0).max()) for numbers in (first, second))
    return (largest, _relative(largest, max(sizes))), num_nan


def _as_numbers(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
