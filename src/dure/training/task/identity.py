"""Identity of what a run trains: its code, the number of samples, and a few of them.

A run that continues with other code or data is another run. Checkpoints contain the identity, and a resume compares it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dure.errors import DataInvalid, TaskInvalid
from dure.strategies.contract.batches import map_tensors
from dure.strategies.state.containers import tensors_in
from dure.training.task.code_digest import code_digests
from dure.training.task.digests import digest
from dure.training.task.task import Task

_SHOWN = 6
_MOST_SECONDS = 1.0
"""Seconds after which no further sample is fetched for the digest."""


@dataclass(frozen=True, kw_only=True)
class TaskIdentity:
    """Identity of a task as saved in a checkpoint, as JSON values."""

    code: dict[str, str] = field(default_factory=dict)
    """Digests of the task's code, by `file.py:name`."""
    train_samples: int = 0
    eval_samples: int = 0
    samples: dict[str, str] = field(default_factory=dict)
    """Digests of a few training samples, by index, without those that differ each time."""

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
            samples=sample_digests(train_samples, fetch),
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
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            found.append(f"the code of {', '.join(names[:_SHOWN])}{more}")
        for key, what in (("train_samples", "training"), ("eval_samples", "evaluation")):
            before, now = saved.get(key), getattr(self, key)
            if before is not None and before != now:
                found.append(f"the {what} data ({before:,} samples then, {now:,} now)")
        both = saved.get("samples", {}).keys() & self.samples.keys()
        differing = sorted((index for index in both if saved["samples"][index] != self.samples[index]), key=int)
        if differing and saved.get("train_samples") == self.train_samples:
            found.append(f"what is in the training data (sample {', '.join(differing)})")
        return found


def refuse_unlike_samples(everyones: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]) -> None:
    """Refuse data of which the ranks do not read the same samples.

    Args:
        everyones: For each rank and kind of data, views of samples by index (`sample_views`).

    Raises:
        DataInvalid: The samples differ; the message names the kind, the sample and the rank.
    """
    for rank, theirs in enumerate(everyones):
        for kind, views in theirs.items():
            known = everyones[0].get(kind, {})
            unlike = next((index for index, one in views.items() if not _are_alike(known.get(index, one), one)), None)
            if unlike is not None:
                raise DataInvalid(
                    f"sample {unlike} of the {kind} data is another one on rank {rank} than on rank 0: give every rank "
                    "all samples in the same order, with no subset or DistributedSampler by rank (dure divides batches "
                    "itself), and sort lists of files"
                )


def sample_views(digests: Mapping[str, str], fetch: Callable[[int], Any]) -> dict[str, Any]:
    """Return views of samples, for comparison between ranks.

    Args:
        digests: Digests of samples, by index.
        fetch: Returns one sample.

    Returns:
        For each index: the digest, the digest of everything except floating-point tensors, and sums and norms of these.
    """

    def view(index: str) -> list[Any]:
        sample = fetch(int(index))
        rest = map_tensors(sample, lambda tensor: list(tensor.shape) if tensor.is_floating_point() else tensor)
        return [digests[index], digest(rest), _sums_of(sample)]

    return {index: view(index) for index in digests}


def _sums_of(sample: Any) -> list[float]:
    floats = [tensor.detach().double() for tensor in tensors_in(sample) if tensor.is_floating_point()]
    return [number for tensor in floats for number in (float(tensor.sum()), float(tensor.norm()))]


def _are_alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two views are of one sample; numbers may be rounded differently on hosts with other processors."""
    (digest, rest, sums), (others_digest, others_rest, others) = one, other
    if digest == others_digest or rest != others_rest:
        return bool(digest == others_digest)
    scale = max(map(abs, (*sums, *others)), default=0.0)
    return (
        bool(sums)
        and len(sums) == len(others)
        and all(abs(a - b) <= 1e-4 * scale for a, b in zip(sums, others, strict=True))
    )


def refusal(changes: list[str], checkpoint: str) -> TaskInvalid:
    """Return the error for a run that would continue as another."""
    return TaskInvalid(
        f"{' and '.join(changes)} changed since {checkpoint} was saved, so the run would not go on as the one it was: "
        "bring back what it was, begin a new run, or go on all the same with --accept-changes, which the run's record "
        "will say"
    )


def sample_digests(num_samples: int, fetch: Callable[[int], Any]) -> dict[str, str]:
    """Return digests of a few samples, by index, without those that differ each time.

    Args:
        num_samples: Length of the data.
        fetch: Returns one sample, with the same random numbers each time.
    """
    found: dict[str, str] = {}
    started = time.monotonic()
    for index in dict.fromkeys((0, num_samples // 2, num_samples - 1)):
        try:
            seen = digest(fetch(index))
            is_same = time.monotonic() - started < _MOST_SECONDS and seen == digest(fetch(index))
        except Exception:
            return found  # training will raise it
        if is_same and seen is not None:
            found[str(index)] = seen
    return found
