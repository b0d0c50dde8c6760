"""Snapshots of a run in memory, step by step: after a rank has died, all ranks continue from the step before.

A snapshot holds what the rank would write of a checkpoint, so that it is loaded like one. Taking one requires no
communication; ranks agree only on the interval, at a few early steps and then ever more rarely.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import psutil
from torch import Tensor

from dure.host.device_kinds import copies_beside
from dure.strategies.contract.replica_state import WHOLE as WHOLE_REPLICA
from dure.strategies.contract.replica_state import replica_of
from dure.strategies.state.checksum import checksum, memory_digest
from dure.training.checkpoints.reader import Checkpoint, checkpoint_of
from dure.training.checkpoints.state import Position
from dure.training.run_state.capture import Progression, restore
from dure.training.run_state.live_share import LiveShare, restore_own_buffers
from dure.training.run_state.replica_check import compares_replicas, divergence_before_restart
from dure.training.session.session import Session
from dure.training.snapshots.device_copies import can_copy_beside
from dure.training.snapshots.exchange import Found, Survey, collect
from dure.training.snapshots.memory import (
    MOST_PLACES,
    NUM_PLACES,
    WHOLE,
    Origin,
    forget_after,
    newest_common,
    read_share,
    replica_digest,
)
from dure.training.snapshots.writer import SnapshotWriter
from dure.units import format_bytes

MOST_FRACTION = 0.02
"""Maximum fraction of the run's time for snapshots at an automatic interval."""
MOST_FOR_EVERY_STEP = 0.04
"""Maximum fraction if it allows a snapshot after each step, so that at most one step is ever repeated."""
MOST_OF_MEMORY = 0.5
"""Maximum fraction of the host's free memory for snapshots."""
_FIRST_AGREEMENT = 8
"""Steps before ranks first agree on the interval; the next agreement follows after four times as many, and so on."""


def steps_between(cost: float, step: float) -> int:
    """Return the number of steps between snapshots that take `cost` seconds, for steps of `step` seconds."""
    return 1 if cost <= MOST_FOR_EVERY_STEP * step else math.ceil(cost / (MOST_FRACTION * step))


class MemorySaver:
    """Snapshots of a session between steps, and access to the newest one that all ranks have."""

    def __init__(
        self,
        session: Session,
        progression: Progression,
        descriptors: Sequence[int],
        every: int | None,
        warn: Callable[[str], None],
        trusted_samples: Callable[[], int] | None = None,
    ) -> None:
        """Prepare to take snapshots; nothing is written yet.

        Args:
            session: Session whose state is captured.
            progression: Progress of the run.
            descriptors: Descriptors of the supervisor's memory, one for each rank of this host; empty to take no
                snapshots.
            every: Steps between snapshots; None for as often as `MOST_FRACTION` of the time allows.
            warn: Receives a sentence if no snapshots can be taken.
            trusted_samples: Returns the position up to which the run is known to be correct; the newest snapshot up to
                there is kept. None if no rank will need it.
        """
        self._trusted_samples = trusted_samples
        self._num_places = NUM_PLACES if trusted_samples is None else MOST_PLACES
        self._warn = warn
        self.session = session
        self.progression = progression
        self._least = 2 if any(copies_beside(device.type) for device in session.strategy.devices) else 1
        """Minimum steps between snapshots at an automatic interval. A copy made during a step is complete only in the
        next one, which another rank may not have reached. A snapshot after each step could therefore leave no step that
        all ranks have."""
        self.every = every or self._least
        self._is_given = every is not None
        self._descriptors = tuple(descriptors) if session.strategy.is_synchronous else ()
        self.is_measuring = bool(self._descriptors) and not self._is_given
        """True if the interval follows from the durations of steps, which `note` receives."""
        self._place = session.place
        self._has_replicas = compares_replicas(session)
        self._survey: Survey | None = None
        self.must_take = False
        """True if a snapshot must be taken before the first step, because new hosts hold none."""
        self._writer: SnapshotWriter | None = None
        self._went_on_from: Position | None = None
        self._share: LiveShare | None = None
        self._steps = 0
        self._next_agreement = _FIRST_AGREEMENT
        self._seconds: list[float] = []
        """Seconds of each snapshot since ranks last agreed."""
        self._step_seconds: list[float] = []
        """Seconds of each step since ranks last agreed."""
        self._is_beside: bool | None = None
        """True if tensors on devices are copied during the next forward and backward; None before the first copy."""
        self._watched: tuple[list[Tensor], int] | None = None
        """Tensors expected to change only in the optimiser's step, and their checksum before a forward and backward."""

    def is_due(self) -> bool:
        """Return whether a snapshot is due at this step boundary; called once at each.

        Communication: at few steps, one gathered JSON message.
        """
        if not self._descriptors:
            return False
        if self._share is None and not self._has_room():
            return False
        self._steps += 1
        if not self._is_given and self._steps == self._next_agreement:
            self._agree()
        return self._steps % self.every == 0

    def _has_room(self) -> bool:
        """Lay out the first snapshot; disable snapshots if a host lacks free memory for those of its ranks.

        The limit is `MOST_OF_MEMORY` of the free memory of the host with the least.

        Communication: one gathered JSON message.
        """
        # a host that remains alone must have all state that ranks have in common
        is_whole = self._place.is_on_several_hosts and self._place.rank.local_rank == 0
        self._share = LiveShare(self.session, self.progression, is_whole=is_whole)
        mine = [self._place.rank.node_rank, self._share.layout.num_bytes, psutil.virtual_memory().available]
        gathered = self.session.group.all_gather_json(mine)
        nodes = {node: sum(one[1] for one in gathered if one[0] == node) for node, _, _ in gathered}
        needed, free = self._num_places * max(nodes.values()), min(one[2] for one in gathered)
        if needed <= MOST_OF_MEMORY * free:
            return True
        self._descriptors, self.is_measuring = (), False
        self._warn(
            f"snapshots in memory would take {format_bytes(needed)} of the {format_bytes(free)} that are free, so none "
            "are taken: after a failure the run goes on from its last checkpoint"
        )
        return False

    def _agree(self) -> None:
        cost = median(self._seconds) if self._seconds else 0.0
        step = median(self._step_seconds) if self._step_seconds else 1.0
        if self.every == 1:
            step = max(step - cost, step / 10)  # each step includes a snapshot
        gathered = self.session.group.all_gather_json([cost, step])
        self.every = max(self._least, steps_between(max(one[0] for one in gathered), min(one[1] for one in gathered)))
        self._next_agreement *= 4
        self._seconds.clear()
        self._step_seconds.clear()
        self._steps = 0

    def take(self, settle: Callable[[], None]) -> None:
        """Take a snapshot of this position.

        Args:
            settle: Writes the records up to this position, and waits for launched steps.
        """
        settle()
        begun = time.perf_counter()
        now, session = self.progression, self.session
        if self._writer is None:
            rank = session.group.rank
            origin = Origin(round=self._place.round, world_size=session.group.world_size, rank=rank)
            self._writer = SnapshotWriter(self._own_descriptor, self._went_on_from, self._num_places, origin)
        assert self._share is not None
        self._share.update()
        position = Position(
            samples_seen=now.samples_seen, step=now.step, epoch=now.samples_seen // session.order.epoch_samples
        )
        trusted = None if self._trusted_samples is None else self._trusted_samples()
        share = self._share
        if self._is_beside is None:
            self._watch(share)
        steady = None
        if self.every > 1:
            steady = share.steady if self._is_beside else [False] * len(share.steady)
        digest = self._replica_digest()
        self._writer.write(share.layout, share.tensors, share.state, position, trusted, steady, share.own, digest)
        self._seconds.append(time.perf_counter() - begun)

    def _replica_digest(self) -> int:
        """Return the digest of this rank's replica; 0 if there is none, or if the snapshot contains it."""
        is_contained = self.session.group.rank == 0 and self._share is not None and self._share.layout.kind == WHOLE
        if is_contained or not self._has_replicas:
            return 0
        replica = replica_of(self.session.strategy)
        return 0 if replica is None else memory_digest(replica.tensors.values())

    def _watch(self, share: LiveShare) -> None:
        """Record which tensors should change only in the optimiser's step, if copies during training depend on that."""
        self._is_beside = False
        steady = zip(share.tensors, share.steady, strict=False)
        watched = [tensor for tensor, is_steady in steady if is_steady and can_copy_beside(tensor)]
        self._watched = (watched, checksum(watched)) if watched else None

    def before_change(self) -> float:
        """Finish copying tensors before the optimiser changes them; return the seconds waited.

        Called between the forward and backward of each step and its optimiser. The first call after a snapshot compares
        the checksum of the steady tensors, because a task may change weights itself, in its loss.
        """
        if self._watched is None and (self._writer is None or self._writer.is_complete):
            return 0.0
        begun = time.perf_counter()
        if self._watched is not None:
            watched, before = self._watched
            self._is_beside, self._watched = checksum(watched) == before, None
        if self._writer is not None and not self._writer.complete():
            self._is_beside = False  # that snapshot is lost, and later ones are copied at once
        waited = time.perf_counter() - begun
        if self._seconds:
            self._seconds[-1] += waited
        return waited

    def note(self, step_seconds: float) -> None:
        """Record the duration of a step."""
        self._step_seconds.append(step_seconds)

    # loading a snapshot

    @property
    def _own_descriptor(self) -> int:
        return self._descriptors[self._place.rank.local_rank]

    def forget_after(self, samples_seen: int) -> None:
        """Forget this rank's snapshots of later positions; every rank does so before any continues."""
        if self._descriptors:
            forget_after(self._own_descriptor, samples_seen)

    def newest(self, has_records: Callable[[int, int], bool]) -> Found | None:
        """Return the newest snapshot from which all ranks can continue; the same on every rank.

        Args:
            has_records: Returns whether the records of a number of ranks reach a position in samples; the last ones of
                a lost host may be missing. Called on the first rank only.

        Communication: on several hosts, two gathered JSON messages.
        """
        if not self._place.is_on_several_hosts:
            found = newest_common(self._descriptors)
            return None if found is None else Found(position=found, round=-1, world_size=len(self._descriptors))
        if not self._descriptors:
            return None
        group = self.session.group
        self._survey = Survey(group, self._place, self._own_descriptor)
        found_all, chosen = self._survey.candidates(), 0
        if group.rank == 0:
            known = (n for n, one in enumerate(found_all) if has_records(one.world_size, one.position.samples_seen))
            chosen = next(known, 0)
        chosen = group.all_gather_json(chosen)[0]
        return found_all[chosen] if found_all else None

    def load(self, found: Found) -> None:
        """Restore the session to a snapshot.

        Communication: one gathered JSON message; on several hosts also the shares that one of them lacks.
        """
        if self._survey is None:
            checkpoint = self._read(found.position)
        else:
            needs = self.session.strategy.needs()
            checkpoint = collect(self.session.group, self._place, self._descriptors, self._survey, found, needs)
            self.must_take = not self._survey.is_everybodys(found)
        restore(self.session, self.progression, checkpoint)
        restore_own_buffers(self.session, checkpoint.per_rank(self.session.group.world_size) or {})
        self._compare_replicas(found)
        self._went_on_from = found.position

    def _compare_replicas(self, found: Found) -> None:
        """Compare what each rank held in common with others at a snapshot with what is loaded from it.

        The state of one rank is loaded on all. If they had parted since they were last compared, that would hide it.

        Communication: one gathered JSON message.

        Raises:
            ReplicasDiverged: A rank held another replica.
        """
        group, is_same = self.session.group, True
        replica = replica_of(self.session.strategy) if self._has_replicas else None
        # of other ranks than those that wrote it, a rank's part may be another one, unless it is the whole
        is_own = self._survey is None or self._survey.is_everybodys(found)
        if replica is not None and (is_own or replica.part == WHOLE_REPLICA):
            round_number = None if self._survey is None else found.round
            then = replica_digest(self._own_descriptor, found.position, round_number)
            is_same = then in (0, memory_digest(replica.tensors.values()))
        if odd := [rank for rank, is_same in enumerate(group.all_gather_json(is_same)) if not is_same]:
            raise divergence_before_restart(self.session.spec, odd, found.position)

    def take_at_once(self) -> None:
        """Take a snapshot before the first step, if there is room, because new hosts hold none yet.

        Communication: one gathered JSON message.
        """
        if self.must_take and self._descriptors and self._has_room():
            self.take(lambda: None)
        self.must_take = False

    def _read(self, position: Position) -> Checkpoint:
        shares = [read_share(descriptor, position).share for descriptor in self._descriptors]
        return checkpoint_of(shares, position, self.session.group.rank)
