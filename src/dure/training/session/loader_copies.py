"""Detection of samples that loader processes read differently, because they keep older state."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dure.strategies.sections.absent_tensors import guarded
from dure.strategies.state.data_tensors import KeptDataSets
from dure.strategies.state.objects.object_state import ObjectState
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.session.loader import Loader
from dure.training.session.sample_order import SampleOrder
from dure.training.task.digests import digest

FOLLOWS_STATE = (
    "data: samples follow state that the run changes, of which loader processes keep the values that they began with "
    "(use --num-workers 0)"
)
_NUM_SAMPLES = 8
_MOST_SECONDS = 0.2
"""Seconds after which no further sample is used."""


class LoaderCopies:
    """First samples as this process reads them at the start, like loader processes, for comparison with later reads."""

    def __init__(self, loader: Loader, order: SampleOrder, objects: Mapping[str, object]) -> None:
        """Read the samples twice, because some differ each time.

        Args:
            loader: Loader of the training data; without loader processes, nothing is read.
            order: Order of the training data.
            objects: Objects whose state is restored after each read.
        """
        self._loader = loader
        self._indices = order.permutation(0)[:_NUM_SAMPLES].tolist() if loader.has_workers else []
        self._objects = objects
        self._first = self._digest(_MOST_SECONDS)
        if self._first is None or self._digest() != self._first:
            self._indices = []

    def differ(self) -> bool:
        """Return whether the batch of the samples has changed since the first read; True only once."""
        now = self._digest()
        if now is None or now == self._first:
            return False
        self._indices = []
        return True

    def _digest(self, most_seconds: float = math.inf) -> str | None:
        """Return the digest of the batch of the samples, or None if there is none.

        Only what `collate` takes of the samples counts: they may also hold caches, or the time at which they were read.

        Args:
            most_seconds: Seconds after which the rest of the samples is left out for good.
        """
        if not self._indices:
            return None
        state = ObjectState({"data": self._loader.data, **self._objects}, sees_data=True)
        data_sets = KeptDataSets({"data": self._loader.data})
        found = None
        with suppress(Exception, CollectiveCalled), no_collectives(), guarded():  # training will raise it
            samples = self._samples(most_seconds)
            self._indices = self._indices[: len(samples)]
            found = digest(self._loader.collated(samples, self._indices)) if samples else None
        data_sets.put_back()
        state.put_back()
        return found

    def _samples(self, most_seconds: float) -> list[Any]:
        """Return the samples that are read within a time."""
        samples: list[Any] = []
        started = time.monotonic()
        for index in self._indices:
            sample = self._loader.sample(index)
            if time.monotonic() - started > most_seconds:
                break
            samples.append(sample)
        return samples
