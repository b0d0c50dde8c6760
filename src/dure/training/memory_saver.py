"""Snapshots of a run in memory, step by step: after the death of a rank all go on from the step before it.

What a rank puts there is what it would write of a checkpoint, so that a snapshot is taken up as one. Nothing is
exchanged for it; only how often it is worth while is agreed on, at a few early steps and then ever more rarely.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor

from dure import torchcompat
from dure.strategies.optimizer_state import EXECUTION_KEYS
from dure.training.checkpoint import Checkpoint, Position
from dure.training.checkpoint_reader import checkpoint_of
from dure.training.checkpoint_share import share_of
from dure.training.session import Session
from dure.training.session_state import Progression, captured, plain_state, rank_state, restore
from dure.training.snapshot_exchange import Found, Survey, brought_up, collect
from dure.training.snapshot_memory import (
    MOST_PLACES,
    NUM_PLACES,
    Origin,
    ShareLayout,
    SnapshotWriter,
    forget_after,
    newest_common,
    read_share,
)
from dure.training.state_tree import encode
from dure.units import format_bytes

MOST_FRACTION = 0.02
"""Of the run's time that snapshots may take when nothing else is asked for, …"""
MOST_FOR_EVERY_STEP = 0.04
"""… unless so much is enough for one after each step: then at most one step is ever done again."""
MOST_OF_MEMORY = 0.5
"""Of the host's free memory that they may take."""
_FIRST_AGREEMENT = 8
"""Steps after which ranks agree on how often to take one, for the first time; then after four times as many, …"""
_as_json = json.JSONEncoder(allow_nan=False).encode
_BUFFER = "buffer."
"""Before the names of the buffers that a rank has for itself (BatchNorm's statistics between two broadcasts)."""


def steps_between(cost: float, step: float) -> int:
    """Return how many steps of `step` seconds go by from one snapshot to the next, at `cost` seconds each."""
    return 1 if cost <= MOST_FOR_EVERY_STEP * step else math.ceil(cost / (MOST_FRACTION * step))


class MemorySaver:
    """Takes snapshots of a session between steps, and gives back the newest that all ranks have."""

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
            session: What to take them of.
            progression: Where it is.
            descriptors: Of every rank of this host, the memory that the supervisor keeps; empty: none are taken.
            every: Steps from one to the next; None: as often as `MOST_FRACTION` of the time allows.
            warn: Receives a sentence if there can be none.
            trusted_samples: Tells up to where the run is known to be right: the newest snapshot of there is kept. None:
                nobody will ask for it.
        """
        self._trusted_samples = trusted_samples
        self._num_places = NUM_PLACES if trusted_samples is None else MOST_PLACES
        self._warn = warn
        self.session = session
        self.progression = progression
        self.every = every or 1
        self._is_given = every is not None
        self._descriptors = tuple(descriptors) if session.strategy.is_in_step else ()
        self._place = session.place
        self._survey: Survey | None = None
        self.must_take = False
        """Whether a snapshot is to be taken before the first step: hosts have come that hold none."""
        self._writer: SnapshotWriter | None = None
        self._went_on_from: Position | None = None
        self._layout: ShareLayout | None = None
        self._signature: list[Any] = []
        self._steps = 0
        self._next_agreement = _FIRST_AGREEMENT
        self._seconds: list[float] = []
        self._begun = 0.0

    def is_due(self) -> bool:
        """Whether this boundary is one for a snapshot; to be asked once at each.

        Communication: at few steps, one gathered JSON message.
        """
        if not self._descriptors:
            return False
        if self._layout is None and not self._has_room():
            return False
        self._steps += 1
        if not self._is_given and self._steps == self._next_agreement:
            self._agree()
        return self._steps % self.every == 0

    def _has_room(self) -> bool:
        """Lay out the first snapshot, and take none at all where two of all ranks' would fill the host's memory.

        Communication: one gathered JSON message.
        """
        self._lay_out(rank_state(self.session))
        assert self._layout is not None
        mine = [self._place.rank.node_rank, self._layout.num_bytes, psutil.virtual_memory().available]
        said = self.session.group.all_gather_json(mine)
        nodes = {node: sum(one[1] for one in said if one[0] == node) for node, _, _ in said}
        needed, free = self._num_places * max(nodes.values()), min(one[2] for one in said)
        if needed <= MOST_OF_MEMORY * free:
            return True
        self._descriptors = ()
        self._warn(
            f"snapshots in memory would take {format_bytes(needed)} of the {format_bytes(free)} that are free, so none "
            "are taken: after a failure the run goes on from its last checkpoint"
        )
        return False

    def _agree(self) -> None:
        step_seconds = (time.perf_counter() - self._begun - sum(self._seconds)) / max(self._steps - 1, 1)
        mine = [median(self._seconds), step_seconds] if self._seconds else [0.0, 1.0]
        said = self.session.group.all_gather_json(mine)
        cost, step = max(one[0] for one in said), max(min(one[1] for one in said), 1e-6)
        self.every = steps_between(cost, step)
        self._next_agreement *= 4
        self._seconds.clear()
        self._begun, self._steps = time.perf_counter(), 0

    def take(self, settle: Callable[[], None]) -> None:
        """Take a snapshot of this position.

        Args:
            settle: Writes out the records up to it.
        """
        begun = time.perf_counter()
        self._begun = self._begun or begun
        settle()
        now, session = self.progression, self.session
        if self._writer is None:
            rank = session.group.rank
            origin = Origin(round=self._place.round, world_size=session.group.world_size, rank=rank)
            self._writer = SnapshotWriter(self._own_descriptor, self._went_on_from, self._num_places, origin)
        own = rank_state(session)
        if not self._is_as_laid_out(own):
            own = self._lay_out(own)
        assert self._layout is not None
        torchcompat.copy_all(self._own, [*own.values()])
        state = {"extra": encode(plain_state(session, now), "extra"), "groups": self._groups()}
        position = Position(
            samples_seen=now.samples_seen, step=now.step, epoch=now.samples_seen // session.order.epoch_samples
        )
        trusted = None if self._trusted_samples is None else self._trusted_samples()
        self._writer.write(self._layout, _as_json(state).encode(), position, trusted)
        self._seconds.append(time.perf_counter() - begun)

    # what is the same from step to step

    def _lay_out(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        snapshot = captured(self.session, self.progression)
        # a host that is left alone must have all that ranks have alike
        is_whole = self._place.is_on_several_hosts and self._place.rank.local_rank == 0
        share = share_of(snapshot, self.session.group.rank, is_whole=is_whole)
        # of its own, so that later states can be put into the same place
        self._own_by_name = {name: tensor.clone() for name, tensor in own.items()}
        share.per_rank = {**self._own_by_name, **self._own_buffers()}
        self._own = list(self._own_by_name.values())
        self._layout = ShareLayout(share, is_spread=snapshot.is_spread)
        self._signature = self._parts()
        return own

    def _is_as_laid_out(self, own: dict[str, Tensor]) -> bool:
        if self._layout is None or own.keys() != self._own_by_name.keys():
            return False
        if any(self._own_by_name[name].shape != tensor.shape for name, tensor in own.items()):
            return False
        now = self._parts()
        return len(now) == len(self._signature) and all(map(_is_same, now, self._signature))

    def _parts(self) -> list[Any]:
        """Return what tells whether the tensors are still those that were laid out."""
        strategy = self.session.strategy
        state = [value for values in strategy.optimizer.state.values() for value in values.values()]
        stepped = [p.data_ptr() for group in strategy.optimizer.param_groups for p in group["params"]]
        return [*state, *stepped, *strategy.model.buffers()]

    def _own_buffers(self) -> dict[str, Tensor]:
        session = self.session
        if session.group.rank == 0:
            return {}
        kept = session.strategy.model.state_dict().keys()
        return {f"{_BUFFER}{name}": b for name, b in session.strategy.model.named_buffers() if name in kept}

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {
                key: encode(value, key)
                for key, value in group.items()
                if key != "params" and key not in EXECUTION_KEYS and not isinstance(value, Tensor)
            }
            for group in self.session.strategy.optimizer.param_groups
        ]

    # taking one up

    @property
    def _own_descriptor(self) -> int:
        return self._descriptors[self._place.rank.local_rank]

    def forget_after(self, samples_seen: int) -> None:
        """Forget this rank's snapshots of later positions; every rank does, before any goes on."""
        if self._descriptors:
            forget_after(self._own_descriptor, samples_seen)

    def newest(self, has_records: Callable[[int, int], bool]) -> Found | None:
        """Return the newest snapshot that all can go on from; the same on every rank.

        Args:
            has_records: Whether the records of so many ranks reach a position, in samples: of a host that is gone, the
                last may be missing. Asked on the first rank.

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
        """Put the session back to a snapshot.

        Communication: one gathered JSON message; on several hosts, shares that one of them has not.
        """
        if self._survey is None:
            checkpoint = self._read(found.position)
        else:
            checkpoint = collect(self.session.group, self._place, self._descriptors, self._survey, found)
            self.must_take = not self._survey.is_everybodys(found)
        restore(self.session, self.progression, checkpoint)
        self._load_buffers(checkpoint)
        self._went_on_from = found.position

    def take_at_once(self) -> None:
        """Take a snapshot before the first step, where there is room: hosts that came hold none yet.

        Communication: one gathered JSON message.
        """
        if self.must_take and self._descriptors and self._has_room():
            self.take(lambda: None)
        self.must_take = False

    def _read(self, position: Position) -> Checkpoint:
        shares = [brought_up(read_share(descriptor, position)) for descriptor in self._descriptors]
        return checkpoint_of(shares, position, self.session.group.rank)

    def _load_buffers(self, checkpoint: Checkpoint) -> None:
        own = checkpoint.per_rank(self.session.group.world_size) or {}
        with torch.no_grad():
            for name, buffer in self.session.strategy.model.named_buffers():
                if (saved := own.get(f"{_BUFFER}{name}")) is not None:
                    buffer.copy_(saved)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one is other
    # what holds tensors deeper down (L-BFGS's history) is laid out anew each time
    return isinstance(one, int | float | str | None) and one == other
