"""Checkpoint policy of a run: when to save, what to save, and where to resume."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial

import psutil
from torch import Tensor

from dure.errors import DiskFull, GroupShrank, StateChanged
from dure.records import events
from dure.records.leader_term import refuse_if_over
from dure.records.run_dir import RunDir
from dure.records.step_record import Metric
from dure.strategies.state.checksum import checksum
from dure.terminal import print_status
from dure.training.checkpoints.async_save import MOST_OF_MEMORY, AsyncSave, SavedCheckpoint
from dure.training.checkpoints.finite_check import finite_parameters
from dure.training.checkpoints.rank_shard import shard_of
from dure.training.checkpoints.reader import Checkpoint
from dure.training.checkpoints.staging import StagingBuffer, steady_tensors
from dure.training.checkpoints.state import Position, Snapshot
from dure.training.checkpoints.store import CheckpointStore
from dure.training.run_state.capture import Progression, captured, restore
from dure.training.run_state.snapshot_policy import MemorySaver
from dure.training.seeds import seed_rank
from dure.training.session.session import Session
from dure.training.session.stop_request import StoppedAtOnce

_LOST_BEST = (
    "the best checkpoint: that of {:,} samples was still being written when a rank was lost, and the best of the other "
    "evaluations is kept"
)


class Checkpointer:
    """Saving and restoring of a session together with its progression.

    At most one checkpoint is being written while training continues. The next save, and the end of the run, wait for
    it. The last checkpoint is written directly from the tensors, because nothing changes them any more.
    """

    def __init__(
        self, session: Session, run: RunDir, progression: Progression, event: Callable[[events.Event], None]
    ) -> None:
        self.session = session
        self.run = run
        self.progression = progression
        self.event = event
        fence = partial(refuse_if_over, run.path, session.place.term)
        self.store = CheckpointStore(run.checkpoints, session.spec.checkpoint.keep, self.warn, fence)
        minutes = session.spec.checkpoint.every_minutes
        self.interval_seconds = None if minutes is None else minutes * 60
        self.last_time = time.monotonic()
        self.last_step = -1
        self.last_samples = -1
        self.copies = StagingBuffer(session.place.threads) if session.spec.checkpoint.background else None
        self.pending: AsyncSave | None = None
        self._watched: tuple[list[Tensor], int] | None = None
        """Tensors expected to change only in the optimiser's step, and their checksum before a forward and backward."""
        self.must_save_best = False
        """True if the current weights are those of the best evaluation, and no checkpoint has them."""
        self._has_reported_full = False
        self._finite = finite_parameters(session.strategy.model)

    @property
    def is_first(self) -> bool:
        """Return whether this rank acts for all ranks; another one does after the first was lost."""
        return self.session.group.rank == 0

    def is_asking(self) -> bool:
        """Return whether this rank requests a save, or that all ranks learn of the failure of the current one.

        Only the clock of the first rank is read, so that clocks need not agree.
        """
        if self.pending is not None and self.pending.has_failed:
            return True
        if self.interval_seconds is None or not self.is_first or (self.pending is not None and self.pending.is_busy):
            return False
        return time.monotonic() - self.last_time >= self.interval_seconds

    def save(self, metrics: Mapping[str, Metric] | None, *, is_last: bool = False) -> None:
        """Save a checkpoint, unless one of this very position is saved already.

        Args:
            metrics: Metrics of the last evaluation; they are saved if it was at this position.
            is_last: Whether to return only when the checkpoint is on disk, and to raise an error if the disk is full.
        """
        now, strategy, group = self.progression, self.session.strategy, self.session.group
        # a save that all ranks were waiting for when a rank was lost is started again
        is_beside = self.pending is None or self.pending.is_copied
        if now.samples_seen == self.last_samples and not is_last and is_beside:
            return
        self.settle()
        if now.samples_seen == self.last_samples:
            return
        started = time.perf_counter()
        strategy.before_reading()
        is_best = now.best is not None and now.best["samples_seen"] == now.samples_seen
        is_evaluated = now.evaluated_samples == now.samples_seen
        self.last_step, self.last_time = now.step, time.monotonic()
        try:
            pending = AsyncSave(
                self.store,
                Position(
                    samples_seen=now.samples_seen,
                    step=now.step,
                    epoch=now.samples_seen // self.session.order.epoch_samples,
                ),
                group,
                metrics={name: asdict(metric) for name, metric in metrics.items()}
                if is_evaluated and metrics
                else None,
                is_best=is_best,
                on_saved=self._report_saved,
                started=started,
            ).begin(self._captured(), group, None if is_last else self.copies)
        except DiskFull as error:
            self._go_on_without(now.samples_seen, error, is_last=is_last)
            return
        self.pending, self.last_samples = pending, now.samples_seen
        if pending.is_copied:
            pending.start()
            return
        if self.copies is not None and not is_last:
            self._give_up_copies(pending)
        pending.write()
        self.settle(is_last=is_last)

    def prepare(self) -> None:
        """Allocate the memory for copies early, during the next steps: new pages cost more than the copying itself.

        Called once, after a first step, when the optimiser has its state.

        Raises:
            TaskInvalid: No checkpoint could hold the state; raised here rather than at the end of the run.
        """
        session, spec, seen = self.session, self.session.spec, self.progression.samples_seen
        if not session.strategy.is_synchronous:
            return
        share = shard_of(self._captured(), session.group.rank)
        epoch_samples = session.order.epoch_samples
        until_next = min(epoch_samples - seen % epoch_samples, spec.checkpoint.every_samples or epoch_samples)
        is_soon = spec.checkpoint.every_minutes is not None or until_next < session.total_samples - seen
        if self.copies is None or not is_soon:
            return
        on_this_host = self.copies.missing_bytes(share) * session.place.rank.local_world_size
        if on_this_host <= MOST_OF_MEMORY * psutil.virtual_memory().available:
            self.copies.prepare(share)
            watched = list(steady_tensors(share))
            self._watched = (watched, checksum(watched)) if watched else None

    def _captured(self) -> Snapshot:
        return replace(captured(self.session, self.progression), finite=self._finite)

    def before_change(self) -> float:
        """Finish pending reads of tensors before the optimiser changes them; return the seconds waited.

        Called between the forward and backward of each step and its optimiser. The first call after `prepare` compares
        the checksum of the steady tensors: a task may change weights itself, in its loss, and then they are copied at
        once. Later changes are detected by torch's version counter.
        """
        if self._watched is None and (self.pending is None or self.pending.is_whole):
            return 0.0
        started = time.perf_counter()
        if self._watched is not None and self.copies is not None:
            watched, before = self._watched
            self.copies.is_beside = checksum(watched) == before
            self._watched = None
        if self.pending is not None:
            self.pending.complete_copy()
        return time.perf_counter() - started

    def settle(self, *, is_last: bool = False) -> bool | None:
        """Wait for the save in progress; return whether it is on disk, or None if there is none.

        The result is also None if the save was dropped because a copied tensor changed; another save may then start
        now. All ranks call this at the same step, and get the same result.

        Args:
            is_last: Whether a full disk is an error.
        """
        pending = self.pending
        if pending is None:
            return None
        seen = pending.position.samples_seen
        try:
            saved = pending.settle(self.session.group)
        except GroupShrank:
            raise  # and settle again, without the rank that was lost
        except DiskFull as error:
            self.pending = None
            self._go_on_without(seen, error, is_last=is_last)
            return False
        except StateChanged as error:
            self.pending = None
            self._forget(seen)
            if self.copies is not None:
                self.copies.is_beside = False
            self.warn(f"{error}; from here on training waits for the copy of each")
            return None
        except BaseException:
            self.pending = None
            raise
        self.pending = None
        if saved is None:
            self._forget(seen)
            return False
        self._has_reported_full = False
        return True

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Release threads and memory; after an error, first complete the current save, unless a second signal came."""
        if self.pending is not None:
            self.pending.leave(is_hurried=kind is not None and issubclass(kind, StoppedAtOnce))
            self.pending = None
        if self.copies is not None:
            self.copies.close()

    def _go_on_without(self, samples_seen: int, error: DiskFull, *, is_last: bool) -> None:
        """Continue training without a checkpoint for which there was no space, and warn once."""
        self._forget(samples_seen)
        if is_last:
            raise error
        if not self._has_reported_full:
            self.warn(f"{error}; training goes on, and the next checkpoint is tried again")
        self._has_reported_full = True

    def _forget(self, samples_seen: int) -> None:
        """Treat a checkpoint as never started, and restore the best evaluation before it."""
        now = self.progression
        self.last_samples, self.last_step = -1, now.step
        if now.best is not None and now.best["samples_seen"] == samples_seen:
            now.best = now.best_before

    def _give_up_copies(self, pending: AsyncSave) -> None:
        if self.copies is not None:
            self.copies.close()
        self.copies = None
        self.warn(
            f"a copy of what a checkpoint holds would take {pending.memory_text} of memory that are free, so training "
            "waits while checkpoints are written"
        )

    def _report_saved(self, saved: SavedCheckpoint) -> None:
        with suppress(DiskFull):  # it is saved even if this fails
            self.event(
                events.CheckpointSaved(
                    path=saved.path.name,
                    samples_seen=saved.position.samples_seen,
                    step=saved.position.step,
                    num_bytes=saved.num_bytes,
                    stall_seconds=saved.stall_seconds,
                    write_seconds=saved.write_seconds,
                    beside_bytes=saved.beside_bytes,
                    is_best=saved.is_best,
                )
            )

    def resume(self) -> None:
        """Load the newest valid checkpoint, the same on every rank, and undo the records after it."""
        group = self.session.group
        if self.is_first:
            self.store.remove_leftovers()
        found = self.store.newest_valid() if self.is_first else None
        name = group.all_gather_json(None if found is None else found.name)[0]
        if name is None:
            seed_rank(self.session.spec.seed, self.session.strategy.random_stream)
            if self.is_first and self.run.last_step(0) is not None:
                self.warn("there is no usable checkpoint: the run starts again, its records so far go to undone.jsonl")
            elif self.is_first and not self.session.place.round and self.run.num_attempts() > 1:
                self.warn("there is no checkpoint yet: the run starts from the beginning")
        else:
            self._load(name)
        self._undo_records()

    def go_on(self, memory: MemorySaver, trusted_samples: int | None = None) -> None:
        """Load the newest snapshot in memory, or resume from a checkpoint if that is newer or there is no snapshot.

        Args:
            memory: Snapshots in memory.
            trusted_samples: Position after which no snapshot may be used; None for no limit. Checkpoints are only
                written at trusted positions.
        """
        group = self.session.group
        if trusted_samples is not None:
            memory.forget_after(trusted_samples)
            group.barrier()
        found = memory.newest(self._has_records)
        seen = -1 if found is None else found.position.samples_seen
        is_taken = found is not None and (
            not self.is_first or all(samples_seen <= seen for _, samples_seen in self.store.positions())
        )
        if not group.all_gather_json(is_taken)[0] or found is None:
            self.resume()
            return
        if self.is_first:
            self.store.remove_leftovers()
        memory.load(found)
        self._look_for_best()
        self._undo_records()
        memory.take_at_once()

    def newest_name(self) -> str | None:
        """Return the name of the newest checkpoint on the first rank; None on other ranks, or if there is none."""
        found = self.store.positions() if self.is_first else []
        return found[0][0].name if found else None

    def _look_for_best(self) -> None:
        """Save the best evaluation's checkpoint again, or forget it, if it was being written when the ranks ended.

        Its weights are still there if the ranks go on from its position. Otherwise the best of the other evaluations
        is kept, and the record says so.
        """
        now, best = self.progression, self.progression.best
        if best is None:
            return
        is_there = self.is_first and any(seen == best["samples_seen"] for _, seen in self.store.positions())
        if self.session.group.all_gather_json(is_there)[0]:
            return
        if best["samples_seen"] == now.samples_seen:
            self.must_save_best = True
            return
        now.best = now.best_before
        self.event(events.NotPreserved(texts=(_LOST_BEST.format(best["samples_seen"]),)))

    def _has_records(self, num_ranks: int, samples_seen: int) -> bool:
        return all(self.run.last_samples(rank) >= samples_seen for rank in range(num_ranks))

    def _undo_records(self) -> None:
        if self.is_first:
            if self.session.place.round and (repeated := self.run.last_samples(0) - self.progression.samples_seen) > 0:
                self.event(events.Repeated(samples=repeated, samples_seen=self.progression.samples_seen))
            self.run.undo_records_after(self.progression.samples_seen)
        self.session.group.barrier()

    def _load(self, name: str) -> None:
        session, now = self.session, self.progression
        path, needs = self.run.checkpoints / name, session.strategy.needs()
        checkpoint = Checkpoint.read(path, rank=session.group.rank, needs=needs)
        restore(session, now, checkpoint)
        self.last_samples = now.samples_seen
        self.event(events.Resumed(checkpoint=name, samples_seen=now.samples_seen, step=now.step))

    def warn(self, message: str) -> None:
        """Record a problem that does not end the run, and print it on the first rank."""
        with suppress(DiskFull):  # the full disk may be the reason for the warning
            self.event(events.Warned(message=message))
        if self.is_first:
            print_status(message)
