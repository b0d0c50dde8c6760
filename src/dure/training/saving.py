"""A run's checkpoints as the run uses them: when to save, what to save, and where to go on."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict

from dure.measure.records import Metric
from dure.rundir import RunDir
from dure.training.checkpoint import Checkpoint, CheckpointStore
from dure.training.memory_saver import MemorySaver
from dure.training.seeds import seed_rank
from dure.training.session import Session
from dure.training.session_state import Progression, captured, restore
from dure.training.snapshot import Position


class Saver:
    """Saves and restores a session together with its progression."""

    def __init__(self, session: Session, run: RunDir, progression: Progression, event: Callable[..., None]) -> None:
        self.session = session
        self.run = run
        self.progression = progression
        self.event = event
        self.store = CheckpointStore(run.checkpoints, session.spec.keep_checkpoints, self.warn)
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
        snapshot = captured(self.session, now)
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
                self.warn("there is no usable checkpoint: the run starts again, its records so far go to undone.jsonl")
        else:
            self._load(name)
        self._undo_records()

    def go_on(self, memory: MemorySaver, trusted_samples: int | None = None) -> None:
        """Take up the snapshot in memory, unless the newest checkpoint is of a later step, or there is none.

        Args:
            memory: Where the snapshots are.
            trusted_samples: None of a later position is to be taken up; checkpoints are written of trusted ones only.
        """
        group = self.session.group
        if trusted_samples is not None:
            memory.forget_after(trusted_samples)
            group.barrier()
        found = memory.newest()
        is_taken = found is not None and (not self.is_first or self._newest_samples() <= found.samples_seen)
        if not group.all_gather_json(is_taken)[0] or found is None:
            self.resume()
            return
        if self.is_first:
            self.store.remove_leftovers()
        memory.load(found)
        self._undo_records()

    def newest_name(self) -> str | None:
        """Return the name of the newest checkpoint, on the first rank."""
        found = self.store.positions() if self.is_first else []
        return found[0][0].name if found else None

    def _newest_samples(self) -> int:
        return max((samples_seen for _, samples_seen in self.store.positions()), default=-1)

    def _undo_records(self) -> None:
        if self.is_first:
            self.run.undo_records_after(self.progression.samples_seen)
        self.session.group.barrier()

    def _load(self, name: str) -> None:
        session, now = self.session, self.progression
        checkpoint = Checkpoint.read(self.run.checkpoints / name, rank=session.group.rank)
        restore(session, now, checkpoint)
        self.last_samples = now.samples_seen
        self.event("resumed", checkpoint=name, samples_seen=now.samples_seen, step=now.step)

    def warn(self, message: str) -> None:
        """Say one sentence of what is wrong without ending the run, on the first rank, and write it down."""
        self.event("warning", message=message)
        if self.is_first:
            with suppress(OSError):  # nobody may be reading any more
                print(f"dure: {message}", file=sys.stderr, flush=True)
