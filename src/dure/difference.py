"""Where two runs part: their settings, samples, losses and weights, from what they left behind."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dure.errors import CheckpointDamaged, CheckpointMismatch
from dure.rundir import RunDir
from dure.training.checkpoint import Checkpoint, CheckpointStore


@dataclass(frozen=True, kw_only=True)
class LossDifference:
    """The first step whose mean losses are not the same."""

    step: int
    losses: tuple[float | None, float | None]
    relative: float
    """Of the larger of the two."""


@dataclass(frozen=True, kw_only=True)
class WeightsDifference:
    """Two checkpoints of one position."""

    samples_seen: int
    largest: float
    """Of all elements of all tensors, absolute; infinite where a tensor is missing or of another shape."""
    relative: float
    """Of the largest element of that tensor."""
    tensor: str | None
    """Where that is; None: the checkpoints are the same bit by bit."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What two runs have in common, and where they part first."""

    runs: tuple[str, str]
    settings: dict[str, tuple[Any, Any]]
    """Those that differ, by name."""
    steps: int
    """That both have done."""
    steps_of_one: tuple[int, int]
    """That only the first, or only the second has done."""
    samples_from: int | None
    """The first step that used other samples, or ended at another position."""
    has_samples: bool
    """Whether both runs recorded which samples each step used; else only how many is compared."""
    losses: LossDifference | None
    weights: list[WeightsDifference]
    """At every position at which both have a checkpoint, from the first on."""

    def part_at(self, tolerance: float) -> str | None:
        """Return where the runs part, in words; None where they do not, up to a relative tolerance."""
        if self.samples_from is not None:
            return f"other samples from step {self.samples_from} on"
        if self.losses is not None and not self.losses.relative <= tolerance:
            return f"other losses from step {self.losses.step} on"
        apart = next((one for one in self.weights if not one.relative <= tolerance), None)
        return None if apart is None else f"other weights after {apart.samples_seen:,} samples"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def compare(first: Path, second: Path, *, tolerance: float = 0.0) -> Difference:
    """Compare two runs.

    Args:
        first: A run's folder.
        second: Another one's.
        tolerance: Up to this relative difference losses are the same.

    Raises:
        RunInvalid: No such run.
    """
    runs = RunDir.open(first), RunDir.open(second)
    specs = [run.read_spec().model_dump(mode="json", exclude={"name", "runs_dir"}) for run in runs]
    settings = {name: (specs[0][name], specs[1][name]) for name in specs[0] if specs[0][name] != specs[1][name]}
    steps = [{record["step"]: record for record in run.records(0)} for run in runs]
    common = sorted(steps[0].keys() & steps[1].keys())
    used = [_samples_by_step(run) for run in runs]
    has_samples = all(samples is not None for samples in used)
    return Difference(
        runs=(str(first), str(second)),
        settings=settings,
        steps=len(common),
        steps_of_one=(len(steps[0]) - len(common), len(steps[1]) - len(common)),
        samples_from=_first_of_other_samples(common, steps, used if has_samples else None),
        has_samples=has_samples,
        losses=_first_other_loss(common, steps, tolerance),
        weights=list(_weights(*runs)),
    )


def _samples_by_step(run: RunDir) -> dict[int, list[int]] | None:
    found: dict[int, list[int]] = {}
    for path in run.path.glob("rank*.jsonl"):
        for record in run.records(int(path.stem.removeprefix("rank"))):
            if record.get("samples") is None:
                return None
            found.setdefault(record["step"], []).extend(record["samples"])
    return {step: sorted(samples) for step, samples in found.items()}


def _first_of_other_samples(common: Iterable[int], steps: list[dict[int, Any]], used: list[Any] | None) -> int | None:
    for step in common:
        if steps[0][step]["samples_seen"] != steps[1][step]["samples_seen"]:
            return step
        if used is not None and used[0][step] != used[1][step]:
            return step
    return None


def _first_other_loss(common: Iterable[int], steps: list[dict[int, Any]], tolerance: float) -> LossDifference | None:
    for step in common:
        one, other = (_mean_loss(of[step]) for of in steps)
        relative = _relative(abs(one - other), max(abs(one), abs(other)))
        if not relative <= tolerance and not (math.isnan(one) and math.isnan(other)):
            return LossDifference(step=step, losses=(one, other), relative=relative)
    return None


def _mean_loss(record: dict[str, Any]) -> float:
    count = record["loss_count"]
    return float(record["loss_sum"] / count) if count else math.nan


def _relative(difference: float, size: float) -> float:
    return difference / size if size else difference


def _weights(*runs: RunDir) -> Iterator[WeightsDifference]:
    one, other = (_checkpoints(run) for run in runs)
    for samples_seen in sorted(one.keys() & other.keys()):
        try:
            weights = [
                Checkpoint.read(path, weights_only=True).weights() for path in (one[samples_seen], other[samples_seen])
            ]
        except (CheckpointDamaged, CheckpointMismatch):
            continue  # a damaged one says nothing of the run
        yield _largest_difference(samples_seen, *weights)


def _checkpoints(run: RunDir) -> dict[int, Path]:
    # the newest first: of several of one position it is the one that counts
    found: dict[int, Path] = {}
    for path, samples_seen in CheckpointStore(run.checkpoints, 1, print).positions():
        found.setdefault(samples_seen, path)
    return found


def _largest_difference(samples_seen: int, one: dict[str, Tensor], other: dict[str, Tensor]) -> WeightsDifference:
    worst = WeightsDifference(samples_seen=samples_seen, largest=0.0, relative=0.0, tensor=None)
    for name in sorted(one.keys() | other.keys()):
        found = _difference_of(one.get(name), other.get(name))
        if found is not None and (worst.tensor is None or found[1] > worst.relative):
            worst = WeightsDifference(samples_seen=samples_seen, largest=found[0], relative=found[1], tensor=name)
    return worst


def _difference_of(one: Tensor | None, other: Tensor | None) -> tuple[float, float] | None:
    """Return the largest absolute and relative difference of two tensors, or None where they have the same bits."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return math.inf, math.inf
    if one.numel() == 0 or bool((one == other).all()):
        return None
    first, second = one.double(), other.double()
    largest = float((first - second).abs().max())
    return largest, _relative(largest, max(float(first.abs().max()), float(second.abs().max())))
