"""Identity of what a run trains: its code, the number of samples, and a few of them.

A run that continues with other code or data is another run. Checkpoints contain the identity, and a resume compares it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from dure.errors import DataInvalid, TaskInvalid
from dure.strategies.contract.batches import map_tensors
from dure.strategies.state.containers import tensors_in
from dure.terminal import few
from dure.training.task.code_digest import code_digests
from dure.training.task.digests import digest
from dure.training.task.task import Task

_SHOWN = 6
_MOST_SECONDS = 1.0
"""Seconds after which no further sample is fetched for a view."""
_ROUNDING = 1e-6
"""Relative difference of numbers that one host may round differently each time: some of MKL's functions depend on how
many threads share a tensor.
"""
_ROUNDING_OF_HOSTS = 1e-4
"""Relative difference of numbers that hosts with other processors may round differently."""


@dataclass(frozen=True, kw_only=True)
class TaskIdentity:
    """Identity of a task as saved in a checkpoint, as JSON values."""

    code: dict[str, str] = field(default_factory=dict)
    """Digests of the task's code, by `file.py:name`."""
    train_samples: int = 0
    eval_samples: int = 0
    samples: dict[str, Any] = field(default_factory=dict)
    """Views of a few training samples, as `sample_views` returns them."""

    @classmethod
    def of(cls, task: Task, train_samples: int, eval_samples: int, fetch: Callable[[int], Any]) -> "TaskIdentity":
        """Return the identity of a task.

        Args:
            task: Task whose code is identified.
            train_samples: Length of the training data.
            eval_samples: Length of the evaluation data, 0 for none.
            fetch: Returns one training sample, with the same random numbers each time.
        """
        return cls(
            code=code_digests(type(task)),
            train_samples=train_samples,
            eval_samples=eval_samples,
            samples=sample_views(train_samples, fetch),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the identity as plain values, for a checkpoint."""
        return asdict(self)

    def changes_since(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the differences from the identity in a checkpoint, as one phrase each."""
        found = []
        had = saved.get("code", {})
        names = [name for name in dict.fromkeys([*had, *self.code]) if had.get(name) != self.code.get(name)]
        if had and names:
            found.append(f"the code of {few(names, _SHOWN)}")
        for key, what in (("train_samples", "training"), ("eval_samples", "evaluation")):
            before, now = saved.get(key), getattr(self, key)
            if before is not None and before != now:
                found.append(f"the {what} data ({before:,} samples then, {now:,} now)")
        both = saved.get("samples", {}).keys() & self.samples.keys()
        differing = [
            index
            for index in sorted(both, key=int)
            if not _are_alike(saved["samples"][index], self.samples[index], _ROUNDING)
        ]
        if differing and saved.get("train_samples") == self.train_samples:
            found.append(f"what is in the training data (sample {', '.join(differing)})")
        return found


def refuse_unlike_samples(by_rank: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Refuse data of which the ranks do not read the same samples.

    Args:
        by_rank: For each rank and kind of data, views of samples by index (`sample_views`).

    Raises:
        DataInvalid: The samples differ; the message names the kind, the sample and the rank.
    """
    for rank, theirs in enumerate(by_rank):
        for kind, views in theirs.items():
            known = by_rank[0].get(kind, {})
            unlike = next(
                (
                    index
                    for index, one in views.items()
                    if not _are_alike(known.get(index, one), one, _ROUNDING_OF_HOSTS)
                ),
                None,
            )
            if unlike is not None:
                raise DataInvalid(
                    f"sample {unlike} of the {kind} data is another one on rank {rank} than on rank 0: give every rank "
                    "all samples in the same order, with no subset or DistributedSampler by rank (dure divides batches "
                    "itself), and sort lists of files"
                )


def sample_views(num_samples: int, fetch: Callable[[int], Any]) -> dict[str, Any]:
    """Return views of a few samples, for comparison with another rank or another time.

    Args:
        num_samples: Length of the data.
        fetch: Returns one sample, with the same random numbers each time.

    Returns:
        For each index, without those of samples that differ each time: the digest, the digest of everything except
        floating-point tensors, and sums and norms of these.
    """
    found: dict[str, Any] = {}
    started = time.monotonic()
    for index in dict.fromkeys((0, num_samples // 2, num_samples - 1)):
        try:
            sample = fetch(index)
            seen = digest(sample)
            is_same = time.monotonic() - started < _MOST_SECONDS and seen == digest(fetch(index))
        except Exception:
            return found  # training will raise it
        if is_same and seen is not None:
            rest = map_tensors(sample, lambda tensor: list(tensor.shape) if tensor.is_floating_point() else tensor)
            found[str(index)] = [seen, digest(rest), _sums_of(sample)]
    return found


def _sums_of(sample: Any) -> list[float | None]:
    """Return sum and norm of each floating-point tensor, None for those that are not finite."""
    floats = [tensor.detach().double() for tensor in tensors_in(sample) if tensor.is_floating_point()]
    numbers = [float(number) for tensor in floats for number in (tensor.sum(), tensor.norm())]
    return [number if isfinite(number) else None for number in numbers]


def _are_alike(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether two views are of one sample whose numbers may be rounded differently.

    Args:
        one: View as `sample_views` returns it, or any JSON value in its place; older checkpoints have the digest alone.
        other: The other one.
        tolerance: Difference of sums and norms, relative to the largest of them.
    """
    match one, other:
        case (str(digest) | [digest, *_], [others_digest, *_]) if digest == others_digest:
            return True
        case ([_, rest, [*sums]], [_, others_rest, [*others]]) if rest == others_rest and len(sums) == len(others):
            most = tolerance * max((abs(n) for n in (*sums, *others) if isinstance(n, float)), default=0.0)
            pairs = [*zip(sums, others, strict=True)]
            return bool(pairs) and all(a == b or _differ_by_at_most(most, a, b) for a, b in pairs)
    return False


def _differ_by_at_most(most: float, *numbers: Any) -> bool:
    return all(isinstance(number, float) for number in numbers) and max(numbers) - min(numbers) <= most


def refusal(changes: list[str], checkpoint: str) -> TaskInvalid:
    """Return the error for a run that would continue as another."""
    return TaskInvalid(
        f"{' and '.join(changes)} changed since {checkpoint} was saved, so the run would not go on as the one it was: "
        "bring back what it was, begin a new run, or go on all the same with --accept-changes, which the run's record "
        "will say"
    )
