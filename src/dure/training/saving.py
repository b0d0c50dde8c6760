"""A run's checkpoints as the run uses them: when to save, what to save, and where to go on."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dure.measure.records import Metric
from dure.rundir import RunDir
from dure.training.checkpoint import Checkpoint, CheckpointStore
from dure.training.seeds import capture_random_state, restore_random_state, seed_rank
from dure.training.session import Session
from dure.training.snapshot import Position, Snapshot

_OWN = "strategy."
"""Before the names of what a strategy keeps for one rank."""


_STREAM = "stream"
"""Under this name a rank keeps which ranks it draws alike with: `Strategy.random_stream`."""


def _prefixed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{_OWN}{name}": tensor for name, tensor in state.items()}


@dataclass
class Progression:
    """How far the run is, and what it carries from step to step and from attempt to attempt."""

    samples_seen: int = 0
    step: int = 0
    best: dict[str, Any] | None = None
    """The best evaluation so far: `metric`, `value`, `samples_seen`."""
    evaluated_samples: int = -1
    """Position of the last evaluation."""
    loss_sum: float = 0.0
    """Since the last evaluation, as is the count."""
    loss_count: float = 0.0


class Saver:
    """Saves and restores a session together with its progression."""

    def __init__(self, session: Session, run: RunDir, progression: Progression, event: Callable[..., None]) -> None:
        self.session = session
        self.run = run
        self.progression = progression
        self.event = event
        self.store = CheckpointStore(run.checkpoints, session.spec.keep_checkpoints, self._warn)
        minutes = session.spec.checkpoint_every_minutes
        self.interval_seconds = None if minutes is None else minutes * 60
        self.last_time = time.monotonic()
        self.last_step = -1
        self.last_samples = -1

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all; another may after the first was lost."""
        return self.session.group.rank == 0

    def is_due_by_time(self) -> bool:
        """Whether this rank's clock asks for a checkpoint; only the first's is asked, so that clocks need not agree."""
        if self.interval_seconds is None or not self.is_first:
            return False
        return time.monotonic() - self.last_time >= self.interval_seconds

    def save(self, metrics: Mapping[str, Metric] | None) -> None:
        """Save a checkpoint, unless this very position is saved already.

        Args:
            metrics: Of the last evaluation; they are kept if it was at this position.
        """
        now, strategy = self.progression, self.session.strategy
        if now.samples_seen == self.last_samples:
            return
        strategy.before_reading()
        state = strategy.state_dict()
        snapshot = Snapshot(
            model=state.model,
            optimizer=state.optimizer,
            is_spread=state.is_spread,
            extra={
                "precision": strategy.precision.state(),
                "expectation": strategy.expectation,
                "progression": asdict(now),
            },
            per_rank={
                **capture_random_state(),
                _STREAM: torch.tensor([strategy.random_stream]),
                **_prefixed(strategy.rank_state()),
            },
        )
        is_best = now.best is not None and now.best["samples_seen"] == now.samples_seen
        is_evaluated = metrics is not None and now.evaluated_samples == now.samples_seen
        epoch = now.samples_seen // self.session.order.epoch_samples
        saved = self.store.save(
            snapshot,
            Position(samples_seen=now.samples_seen, step=now.step, epoch=epoch),
            self.session.group,
            metrics={name: asdict(metric) for name, metric in metrics.items()} if metrics and is_evaluated else None,
            is_best=is_best,
        )
        self.last_samples, self.last_step, self.last_time = now.samples_seen, now.step, time.monotonic()
        self.event(
            "checkpoint",
            path=saved.path.name,
            samples_seen=now.samples_seen,
            step=now.step,
            bytes=saved.num_bytes,
            seconds=saved.seconds,
            is_best=is_best,
        )

    def resume(self) -> None:
        """Take up the newest good checkpoint, on every rank the same one, and undo the records of what came after."""
        group = self.session.group
        if self.is_first:
            self.store.remove_leftovers()
        found = self.store.newest_valid() if self.is_first else None
        name = group.all_gather_json(None if found is None else found.name)[0]
        if name is None:
            seed_rank(self.session.spec.seed, self.session.strategy.random_stream)
            if self.is_first and any(self.run.records(0)):
                self._warn("there is no usable checkpoint: the run starts again, its records so far go to undone.jsonl")
        else:
            self._load(name)
        if self.is_first:
            self.run.undo_records_after(self.progression.samples_seen)
        group.barrier()

    def _load(self, name: str) -> None:
        session, now = self.session, self.progression
        checkpoint = Checkpoint(self.run.checkpoints / name, rank=session.group.rank)
        session.strategy.load_state_dict(checkpoint)
        session.strategy.precision.load_state(checkpoint.extra["precision"])
        session.strategy.expectation = checkpoint.extra["expectation"]
        for field, value in checkpoint.extra["progression"].items():
            setattr(now, field, value)
        self.last_samples = now.samples_seen
        state = checkpoint.per_rank(session.group.world_size)
        drew = -1 if state is None else int(state.pop(_STREAM, torch.tensor([session.group.rank])))
        if state is None or not all(session.group.all_gather_json(drew == session.strategy.random_stream)):
            # other ranks, or ranks that draw otherwise together: no draws can be continued, so each rank begins anew
            # from this position
            seed_rank(session.spec.seed + now.samples_seen, session.strategy.random_stream)
        else:
            restore_random_state(state)
            own = {name.removeprefix(_OWN): t for name, t in state.items() if name.startswith(_OWN)}
            session.strategy.load_rank_state(own)
        self.event("resumed", checkpoint=name, samples_seen=now.samples_seen, step=now.step)

    def _warn(self, message: str) -> None:
        self.event("warning", message=message)
        if self.is_first:
            with suppress(OSError):  # nobody may be reading any more
                print(f"dure: {message}", file=sys.stderr, flush=True)
