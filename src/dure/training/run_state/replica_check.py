"""Comparison of replicas, at intervals and before every checkpoint, so that no flipped bit goes unnoticed.

Each rank sends one number: a checksum of its replica. If they differ (decision 18), either the run ends and names the
rank, or all ranks go back to where they agreed. All later steps contain the wrong rank's gradients.
"""

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from dure.errors import ReplicasDiverged, SpecInvalid, TaskInvalid
from dure.records import events
from dure.spec import RunSpec
from dure.strategies.contract.replica_state import replica_of
from dure.strategies.state.checksum import checksum
from dure.strategies.state.optimizer import difference_of_settings, plain_settings
from dure.terminal import few
from dure.torchcompat.optimizers import is_of_torch, step_hooks
from dure.training.checkpoints.state import Position
from dure.training.run_state.capture import Progression
from dure.training.run_state.divergence import Divergence, common_parts, find_divergence, listed_ranks
from dure.training.session.session import Session

MOST_FRACTION = 0.01
"""Maximum fraction of the run's time for comparisons at an automatic interval."""
_AIMED_FRACTION = 0.7 * MOST_FRACTION
"""Fraction for which the interval is chosen; on a shared machine the times of comparisons and steps are only known to a
third at best."""
_SLOWEST_GROWTH = 4
"""Maximum growth from one interval to the next, so that one slow comparison does not delay the others for long."""
_EARLY_STEPS = 64
"""Steps up to which code is so much likelier to be the cause than hardware that different state is named as it."""
_REMEMBERED = 5
"""Number of recent comparisons whose cost determines the next interval."""
_CAUSE = (
    "likelier than broken hardware is code that does something on some ranks only (under a condition on the rank, or "
    "with draws, files or a clock of its own), or an optimiser or a hook on its step that uses what each rank computes "
    "from its own samples: run again, and if the same tensor differs at the same step it is the "
    "code, if another does it is the hardware of a device; --check-replicas-every 1 tells the step exactly"
)
"""Most common cause of a divergence, and how to confirm it."""
_SETTINGS = ("check_replicas_every", "on_divergence")


def compares_replicas(session: Session) -> bool:
    """Return whether the ranks of a session may hold equal state that the settings allow to compare."""
    strategy = session.strategy
    knows_how = _SETTINGS[0] in strategy.info.settings and strategy.is_synchronous
    return session.group.world_size > 1 and session.spec.check_replicas_every != 0 and knows_how


def divergence_before_restart(spec: RunSpec, ranks: Sequence[int], position: Position) -> ReplicasDiverged:
    """Return the error for ranks that held other values than the others at a snapshot, before a restart."""
    seen = (
        f"before the restart {listed_ranks(ranks)} held other weights or optimiser state after step {position.step} "
        "than the ranks from whose snapshot the run would continue"
    )
    if spec.on_divergence == "heal":
        return ReplicasDiverged(f"{seen}; {_CAUSE}", position.samples_seen - 1)
    cure = "continue from an earlier checkpoint with --resume, or begin with the first step"
    return ReplicasDiverged(f"{seen}; {_CAUSE}; {cure} (--on-divergence heal does that by itself)")


class Pace:
    """Number of steps between comparisons."""

    def __init__(self, every: int | None) -> None:
        """Use a fixed number of steps; None for as many as keep comparisons below `MOST_FRACTION` of the time."""
        self.every = every or 1
        self._is_given = every is not None
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, cost_seconds: float, step_seconds: float) -> None:
        """Record the seconds of a comparison and of a step before it, with the same values on all ranks."""
        if self._is_given:
            return
        self._costs.append(cost_seconds)
        needed = math.ceil(median(self._costs) / (_AIMED_FRACTION * max(step_seconds, 1e-6)))
        self.every = max(1, min(needed, _SLOWEST_GROWTH * self.every))


class ReplicaCheck:
    """Comparison of a session's replicas between steps."""

    def __init__(
        self,
        session: Session,
        progression: Progression,
        event: Callable[[events.Event], None],
        checkpoint: Callable[[], str | None],
    ) -> None:
        """Prepare the check; `begin` is called once the session is at the position from which it continues.

        Args:
            session: Session whose replicas are compared.
            progression: Progress of the run.
            event: Records an event, on the first rank.
            checkpoint: Returns the name of the newest checkpoint, on the first rank.
        """
        spec = session.spec
        self.session = session
        self.progression = progression
        self.event = event
        self.checkpoint = checkpoint
        self.heals = spec.on_divergence == "heal"
        self.pace = Pace(spec.check_replicas_every)
        self.is_on = compares_replicas(session)
        self.agreed_samples = self.agreed_step = 0
        """Position in samples and in steps at which all ranks last agreed."""
        self.count = 0
        self.seconds = 0.0
        """Seconds spent on comparisons, including the wait for other ranks."""
        self._checked = self._next = -1
        self._past_settings = 0
        """Checksum of the optimiser's settings before every step, if its step has hooks."""
        self._exchange_seconds = 0.0
        self._begun = self._last = time.perf_counter()

    def begin(self) -> None:
        """Record the position as agreed, because all ranks loaded the same state, and find out whether replicas exist.

        Communication: one gathered JSON message.

        Raises:
            SpecInvalid: Comparisons were requested, and no two ranks hold equal state.
        """
        now, spec = self.progression, self.session.spec
        self.agreed_samples, self.agreed_step = now.samples_seen, now.step
        self._checked, self._next = now.step, now.step + self.pace.every
        was_on = self.is_on
        if self.is_on:
            own = replica_of(self.session.strategy)
            self.is_on = bool(common_parts(self.session.group.all_gather_json(None if own is None else own.part)))
        is_asked_for = bool(spec.check_replicas_every) or self.heals
        if is_asked_for and not self.is_on and self.session.group.world_size > 1:
            why = "no two ranks hold the same in this layout" if was_on else "ranks are not in step with each other"
            raise SpecInvalid(
                [f"check_replicas_every or on_divergence is set, but {why}: there is nothing to compare; leave it out"]
            )
        self._begun = self._last = time.perf_counter()

    def is_due(self) -> bool:
        """Return whether a comparison is due at this step boundary."""
        return self.is_on and self.progression.step >= self._next

    def check(self, *, again: bool = False) -> None:
        """Compare now, unless this step has been compared already.

        Args:
            again: Whether to compare even then.

        Communication: one gathered JSON message of 100 bytes.

        Raises:
            ReplicasDiverged: Ranks that must hold equal state do not.
            TaskInvalid: They differ because settings or attributes of their optimisers differ.
        """
        now, group = self.progression, self.session.group
        if not self.is_on or (now.step == self._checked and not again):
            return
        begun = time.perf_counter()
        step_seconds = (begun - self._last) / max(now.step - self._checked, 1)
        own = replica_of(self.session.strategy)
        digest = None if own is None else checksum(own.tensors.values())
        summed = time.perf_counter()
        reports = group.all_gather_json(
            {
                "part": None if own is None else own.part,
                "digest": digest,
                "seconds": [summed - begun, self._exchange_seconds, step_seconds],
            }
        )
        self._last = time.perf_counter()
        self._exchange_seconds = self._last - summed
        for part, ranks in common_parts([one["part"] for one in reports]).items():
            digests = {rank: reports[rank]["digest"] for rank in ranks}
            if len(set(digests.values())) > 1:
                self._refuse_unlike_settings()
                is_exact = now.step == self.agreed_step + 1 and now.step <= _EARLY_STEPS
                if self.count == 0 or is_exact:  # later, they may follow from the wrong values of another rank
                    self._refuse_unlike_attributes()
                mine = own if own is not None and own.part == part else None
                self._diverged(find_divergence(group, mine, digests))
        self._agree(reports)

    def _refuse_unlike_settings(self) -> None:
        """Refuse a schedule or optimiser that depends on each rank's own data: going back would not help.

        Communication: one gathered JSON message.

        Raises:
            TaskInvalid: Settings differ, or have differed.
        """
        own = plain_settings(self.session.strategy.optimizer)
        by_rank = self.session.group.all_gather_json([own, self._past_settings])
        for rank, (settings, past) in enumerate(by_rank):
            difference = difference_of_settings(by_rank[0][0], settings, "on rank 0", f"on rank {rank}")
            if difference is None and past != by_rank[0][1]:
                difference = f"settings of the optimiser have been others on rank {rank} than on rank 0"
            if difference:
                raise TaskInvalid(
                    f"after step {self.progression.step} {difference}, so ranks no longer train the same weights: let "
                    "the schedule follow samples seen or evaluations, and not the losses of a rank's own samples"
                )

    def _refuse_unlike_attributes(self) -> None:
        """Refuse an optimiser that uses what a hook or the loss computes from each rank's own samples.

        Communication: one gathered JSON message.

        Raises:
            TaskInvalid: Attributes of the optimiser differ; or those of the task, the model, its buffers or its
                parameters, which the task's own optimiser, or a hook on its step, can read.
        """
        kept, strategy = self.session.kept, self.session.strategy
        own = kept.checksums("optimizer")
        if step_hooks(strategy.built_optimizer) or not is_of_torch(strategy.built_optimizer):
            buffers = {f"model.{name}": checksum([buffer]) for name, buffer in strategy.model.named_buffers()}
            own |= {**buffers, **kept.checksums("model"), **kept.checksums("task")}
        by_rank = self.session.group.all_gather_json(own)
        first = by_rank[0]
        if names := {name for one in by_rank for name in {**first, **one} if one.get(name) != first.get(name)}:
            raise TaskInvalid(
                f"after step {self.progression.step} ranks hold different weights and different values of "
                f"{few(sorted(names))}, as if a hook or the loss computed them from each rank's own samples: average "
                "them over the ranks (torch.distributed.all_reduce) before the optimiser uses them, or train in one "
                "process"
            )

    def note_settings(self) -> None:
        """Record the optimiser's settings before a step, which hooks on the last one may have set."""
        if self.is_on:
            settings = plain_settings(self.session.strategy.optimizer)
            self._past_settings = zlib.crc32(repr(settings).encode(), self._past_settings)

    def _agree(self, reports: list[dict[str, Any]]) -> None:
        now = self.progression
        self.agreed_samples, self.agreed_step, self._checked = now.samples_seen, now.step, now.step
        summing, exchanging, stepping = zip(*(one["seconds"] for one in reports), strict=True)
        # the wait for the last rank is included, although part of it would otherwise occur in the next step
        self.pace.note(max(map(sum, zip(summing, exchanging, strict=True))), min(stepping))
        self._next = now.step + self.pace.every
        self.count += 1
        self.seconds += summing[self.session.group.rank] + self._exchange_seconds

    def _diverged(self, found: Divergence) -> None:
        now, run = self.progression, self.session
        checkpoint = run.group.all_gather_json(self.checkpoint())[0]
        message = found.describe(now.step)
        self.event(
            events.ReplicasDiverged(
                step=now.step,
                samples_seen=now.samples_seen,
                agreed_step=self.agreed_step,
                agreed_samples=self.agreed_samples,
                ranks=found.odd,
                holders=found.holders,
                tensors=found.tensors,
                element=found.element,
                values={str(rank): value for rank, value in found.values.items()},
                message=message,
            )
        )
        seen = f"{message}; all agreed after step {self.agreed_step}"
        if self.heals:
            raise ReplicasDiverged(f"{seen}; {_CAUSE}", self.agreed_samples)
        if checkpoint is None:
            cure = "there is no earlier checkpoint, so begin with the first step"
        else:
            cure = f"the steps since cannot be trusted: continue from the earlier checkpoint {checkpoint} with --resume"
        raise ReplicasDiverged(f"{seen}; {_CAUSE}; {cure} (--on-divergence heal does that by itself)")

    def close(self) -> None:
        """Record the share of the time that comparisons took."""
        if self.count:
            spent = time.perf_counter() - self._begun
            fraction = self.seconds / spent
            self.event(
                events.ReplicasCompared(
                    count=self.count, every=self.pace.every, seconds=self.seconds, fraction=fraction
                )
            )
