"""Detection of samples that loader processes read in another way, because they keep older state."""

import time
from collections.abc import Mapping
from contextlib import suppress

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
"""Seconds after which no further sample is read."""


class LoaderCopies:
    """First samples as this process reads them, for comparison with later reads. Loader processes began like that."""

    def __init__(self, loader: Loader, order: SampleOrder, objects: Mapping[str, object]) -> None:
        """Read the samples.

        Args:
            loader: Loader of the training data; without loader processes, nothing is read.
            order: Order of the training data.
            objects: Objects whose state is restored after each read.
        """
        self._loader = loader
        self._indices = order.permutation(0)[:_NUM_SAMPLES].tolist() if loader.has_workers else []
        self._objects = objects
        self._first = self._digests()

    def differ(self) -> bool:
        """Return whether a sample is another one now than at first; True only once."""
        if any(one != other for one, other in zip(self._first, self._digests(), strict=False)):
            self._indices = []
            return True
        return False

    def _digests(self) -> list[str | None]:
        if not self._indices:
            return []
        state = ObjectState({"data": self._loader.data, **self._objects}, sees_data=True)
        data_sets = KeptDataSets([self._loader.data])
        digests = []
        started = time.monotonic()
        with suppress(Exception, CollectiveCalled), no_collectives():  # training will raise it
            for index in self._indices:
                with guarded():
                    digests.append(digest(self._loader.sample(index)))
                if time.monotonic() - started > _MOST_SECONDS:
                    break
        data_sets.put_back()
        state.put_back()
        return digests
