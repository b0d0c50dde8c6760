"""Samples of each step: which ones a rank computes, and their computation as they arrive from the loader."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from dure.data.partition import shares
from dure.errors import DureError, TaskInvalid, message_of
from dure.strategies.contract.abilities import OutlivesRanks, ServesSteps, share_by_step
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.step_facts import Requests
from dure.strategies.contract.strategy import Strategy
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.session.loader import FetchRequest, Loader
from dure.training.session.sample_order import GlobalBatch, SampleOrder

_END = object()
"""Marker after the last batch."""
_PLANNED_AT_ONCE = 16
"""Steps that are planned together: between two steps the processor's caches are full of the model, and to plan each by
itself takes several times as long.
"""


class RankBatch(NamedTuple):
    """Samples of one step that one rank computes."""

    indices: np.ndarray
    """Data indices, contiguous in the global batch."""
    microbatches: Sequence[int]
    """Sizes of its microbatches; 0 marks padding."""
    stand_in: np.ndarray
    """Data index `(1,)` from which a microbatch of size 0 is computed, with weight zero."""

    @classmethod
    def of(cls, batch: GlobalBatch, rank: int, world_size: int, microbatch_size: int | None) -> "RankBatch":
        """Take a rank's share of a global batch, and divide it into microbatches.

        All ranks get the same number of microbatches, that of the largest share. They therefore all call the
        collectives inside the model (synchronised BatchNorm).
        """
        start, end, microbatches = _cut(len(batch.indices), rank, world_size, microbatch_size)
        return cls(batch.indices[start:end], microbatches, batch.indices[:1])


@lru_cache(maxsize=8)
def _cut(num_samples: int, rank: int, world_size: int, microbatch_size: int | None) -> tuple[int, int, list[int]]:
    """Return start and end of a rank's share, and its microbatches; cached, because most steps are alike."""
    counts = shares(num_samples, world_size)
    start = sum(counts[:rank])
    num_microsteps = 1 if microbatch_size is None else math.ceil(counts[0] / microbatch_size)
    return start, start + counts[rank], shares(counts[rank], num_microsteps)


class PlannedStep(NamedTuple):
    """Step whose samples are known."""

    batch: GlobalBatch
    share: RankBatch
    """Samples that this rank computes."""

    def requests(self) -> Iterator[FetchRequest]:
        """Yield the requests for its microbatches."""
        start = 0
        for size in self.share.microbatches:
            indices = self.share.indices[start : start + size] if size else self.share.stand_in
            yield FetchRequest(self.batch.epoch, indices)
            start += size


class StepSamples(Protocol):
    """Samples of this rank in one step after another."""

    wait_seconds: float
    """Seconds for which the current step has waited for data."""
    is_under_way: bool
    """True from the wait for a step's samples to its end, which the loop sets."""

    def begin(self, samples_seen: int, total_samples: int, step: int) -> None:
        """Begin after a step, up to a number of samples."""

    def next_step(self) -> PlannedStep | None:
        """Wait for the first samples of the next step, and return the step; None at the end."""

    def compute(self, step: PlannedStep, requests: Requests) -> None:
        """Compute the step up to its gradients.

        Args:
            step: Value that `next_step` returned last.
            requests: Requests of this rank.
        """

    def microbatch_under_way(self) -> int | None:
        """Return the maximum samples that a device computes at once in the current step; None between two steps."""

    def end(self) -> None:
        """End the loader's processes, if there are any."""


def samples_of(strategy: Strategy, loader: Loader, order: SampleOrder, microbatch_size: int | None) -> StepSamples:
    """Return the samples that a rank computes in each step, none if it only serves the other ranks.

    Args:
        strategy: Strategy of this rank.
        loader: Loader of the training data.
        order: Order of the samples.
        microbatch_size: Maximum samples of one microbatch on a device; None for as many as the strategy allows.
    """
    size = strategy.parts.process_size(microbatch_size) if microbatch_size else strategy.parts.default_size()
    if isinstance(strategy, ServesSteps) and not strategy.share.takes_samples:
        return NoSamples(strategy, order)
    return LoadedSamples(strategy, loader, order, size)


class LoadedSamples:
    """Samples from a loader, which fetches those of later steps ahead."""

    def __init__(
        self, strategy: Strategy, loader: Loader, order: SampleOrder, microbatch_size: int | None = None
    ) -> None:
        self.wait_seconds = 0.0
        self._strategy = strategy
        self._loader = loader
        self._order = order
        self._microbatch_size = microbatch_size
        """Maximum samples of one microbatch of this process."""
        self.is_under_way = False
        self._current: PlannedStep | None = None
        self._planned: deque[PlannedStep] = deque()
        """Steps after it that have been planned."""
        self._fetched: Iterator[Any] = iter(())
        self._waiting: list[Any] = []
        """Microbatch that was fetched and not yet computed; its memory is released after its use."""

    def begin(self, samples_seen: int, total_samples: int, step: int) -> None:
        """Begin after a step, up to a number of samples."""
        self._fetched = self._loader.batches(self._requested(samples_seen, total_samples, step))

    def next_step(self) -> PlannedStep | None:
        """Wait for the first samples of the next step, and return the step; None at the end."""
        self.wait_seconds = 0.0
        self.is_under_way = True
        self._current = None
        batch = self._fetch()
        if batch is _END:
            self.is_under_way = False
            return None
        self._waiting.append(batch)
        self._current = self._planned.popleft()
        return self._current

    def compute(self, step: PlannedStep, requests: Requests) -> None:
        """Run forward and backward of every microbatch."""
        try:
            self._strategy.forward_backward(
                self._microbatches(step.share), global_samples=len(step.batch.indices), requests=requests
            )
        except Exception as error:
            if not (self._strategy.rules.divides_model or self._strategy.share.is_joint):  # else all ranks compute it
                self._refuse_if_by_part(error, step, self._loss, "the loss")
            raise

    def microbatch_under_way(self) -> int | None:
        """Return the maximum samples that a device computes at once in the current step; None between two steps."""
        step = self._current or next(iter(self._planned), None)
        if not self.is_under_way or step is None:
            return None
        return self._strategy.parts.device_size(max(*step.share.microbatches, 1))

    def end(self) -> None:
        """End the loader's processes, which their iterator does as it is released."""
        self._fetched = iter(())

    def _requested(self, samples_seen: int, total_samples: int, step: int) -> Iterator[FetchRequest]:
        strategy = self._strategy
        share_at = share_by_step(strategy)
        num_at_once = 1 if isinstance(strategy, OutlivesRanks) else _PLANNED_AT_ONCE
        batches = enumerate(self._order.batches(samples_seen, total_samples), step + 1)
        while numbered := list(islice(batches, num_at_once)):
            steps = [
                PlannedStep(batch, RankBatch.of(batch, *share_at(number), self._microbatch_size))
                for number, batch in numbered
            ]
            self._planned.extend(steps)
            yield from [request for step in steps for request in step.requests()]

    def _fetch(self) -> Any:
        start = time.perf_counter()
        try:
            batch = next(self._fetched, _END)
        except Exception as error:
            if isinstance(error, RuntimeError) and "DTensor" in str(error):
                raise TaskInvalid(
                    f"samples follow from weights of the model, of which a rank of {self._strategy.info.name} has a "
                    "part only: let the loss use them, or use ddp"
                ) from error
            if (step := self._current or next(iter(self._planned), None)) is not None:
                self._refuse_if_by_part(error, step, lambda batch: None, "collate")
            raise
        self.wait_seconds += time.perf_counter() - start
        if batch is None:
            raise TaskInvalid(
                "a training batch is None: the task's collate, or __getitems__ of its data, returned nothing; return "
                "the batch"
            )
        return batch

    def _loss(self, batch: Any) -> None:
        """Call the task's loss without gradients."""
        strategy = self._strategy
        with torch.no_grad(), strategy.precision.autocast():
            strategy.objects["task"].loss(strategy.model, batch)  # type: ignore[attr-defined]

    def _refuse_if_by_part(self, error: Exception, step: PlannedStep, use: Callable[[Any], None], what: str) -> None:
        """Refuse a task whose loss or `collate` fails on a part of a batch, and not on the whole of it.

        The run ends in any case: nothing that is called here need be undone.

        Args:
            error: Error that ended the step, which may have another cause, such as a rank that was lost.
            step: The step.
            use: Called with a batch; it raises the error again.
            what: What may have failed, for the sentence.

        Raises:
            TaskInvalid: It fails on the part alone.
        """
        parts = [request.indices for request in step.requests()]
        is_ours = isinstance(error, DureError | MemoryError | torch.OutOfMemoryError)
        if is_ours or len(parts[0]) == len(step.batch.indices):
            return
        failed = next((part for part in parts if self._fails_on(step.batch.epoch, part, use) is type(error)), None)
        if failed is None or self._fails_on(step.batch.epoch, step.batch.indices, use) is not None:
            return
        lines = f"{type(error).__name__}: {message_of(error)}".splitlines()
        raise TaskInvalid(
            f"{what} takes the {len(step.batch.indices)} samples of a batch together, but fails on the {len(failed)} "
            f"of them that it gets here ({lines[0][:200]}): give it samples of which any part is a batch, with "
            'what cannot be used left out of the data, a larger batch, or strategy="single" with whole batches'
        ) from error

    def _fails_on(self, epoch: int, indices: np.ndarray, use: Callable[[Any], None]) -> type[Exception] | None:
        """Return the class of the error that a batch of some samples leads to, or None."""
        try:
            with no_collectives():
                use(next(self._loader.without_workers().batches([FetchRequest(epoch, indices)])))
        except CollectiveCalled:
            return RuntimeError
        except Exception as error:
            return type(error)
        return None

    def _microbatches(self, share: RankBatch) -> Iterator[Microbatch]:
        for position, size in enumerate(share.microbatches):
            if position:
                self._waiting.append(self._fetch())
            yield Microbatch(self._waiting.pop(), size or 1, size == 0)


class NoSamples:
    """Steps of a rank that computes no samples and serves the other ranks instead."""

    def __init__(self, strategy: ServesSteps, order: SampleOrder) -> None:
        self.wait_seconds = 0.0
        self.is_under_way = False
        self._strategy = strategy
        self._order = order
        self._batches: Iterator[GlobalBatch] = iter(())

    def begin(self, samples_seen: int, total_samples: int, step: int) -> None:
        """Begin after a step, up to a number of samples."""
        self._batches = self._order.batches(samples_seen, total_samples)

    def next_step(self) -> PlannedStep | None:
        """Return the next step, of which this rank computes nothing; None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else PlannedStep(batch, RankBatch(batch.indices[:0], (), batch.indices[:0]))

    def compute(self, step: PlannedStep, requests: Requests) -> None:
        """Begin the step."""
        self._strategy.serve_step(requests)

    def microbatch_under_way(self) -> None:
        """Return None: no sample is computed here."""

    def end(self) -> None:
        """Do nothing: there is no loader."""
