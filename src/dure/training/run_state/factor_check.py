"""Comparison of the schedule's factors that ranks have used.

A schedule may depend on state that the loss or an evaluation keeps. Each rank may have its own such state, and ranks
that compute no loss have none. A comparison of replicas does not show it if ranks hold different parts of the model.
"""

import zlib

from dure.errors import TaskInvalid
from dure.training.session.session import Session
from dure.training.task.task import Schedule


class FactorCheck:
    """Factors since the last comparison, which is due after steps whose number is a power of two."""

    def __init__(self, session: Session) -> None:
        self._group = session.group
        self._is_on = session.group.world_size > 1 and session.strategy.is_synchronous
        self._has_schedule = False
        self._last = 1.0
        self._sum = 0
        """Checksum of all factors since the last comparison."""

    def noted(self, schedule: Schedule | None) -> Schedule | None:
        """Return the schedule with a record of its factors."""
        self._has_schedule = schedule is not None
        if schedule is None or not self._is_on:
            return schedule

        def noting(samples_seen: int) -> float:
            self._last = schedule(samples_seen)
            self._sum = zlib.crc32(repr(float(self._last)).encode(), self._sum)
            return self._last

        return noting

    def is_due(self, step: int) -> bool:
        """Return whether a comparison is due after a step."""
        return not step & (step - 1)

    def check(self, step: int) -> None:
        """Compare the factors of all ranks, after a step.

        Communication: one gathered JSON message.

        Raises:
            TaskInvalid: They were not the same.
        """
        if not (self._is_on and self._has_schedule):
            return
        by_rank = self._group.all_gather_json([self._sum, self._last])
        self._sum = 0
        checksums, factors = zip(*by_rank, strict=True)
        if len({*checksums}) == 1:
            return
        rank = next((n for n, factor in enumerate(factors) if factor != factors[0]), None)
        if rank is None:
            rank = next(n for n, checksum in enumerate(checksums) if checksum != checksums[0])
            seen = f"the schedule gave rank 0 and rank {rank} other factors in a step before step {step}"
        else:
            factor = factors[rank]
            seen = f"the schedule's factor was {factors[0]:g} on rank 0 and {factor:g} on rank {rank} in step {step}"
        raise TaskInvalid(
            f"{seen}: it follows what the loss or an evaluation keeps, which is each rank's own; let it follow from "
            "the samples seen, or use --strategy single"
        )
