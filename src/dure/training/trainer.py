"""Trainer of one rank: steps, evaluations, checkpoints, records."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import TypeVar

from dure.errors import GroupShrank, LossNotFinite, ReplicasDiverged
from dure.host.devices import count_cores
from dure.host.thread_check import slowdown_of_threads
from dure.measure.operations import BackwardOperations
from dure.measure.step_profile import StepProfile
from dure.measure.usage_samples import UsageSampler, gpus_of
from dure.records import events
from dure.records.full_disk import SPACE_WAIT
from dure.records.run_dir import RunDir
from dure.records.step_record import RATES, Metric, StepRecord
from dure.records.step_writer import RecordWriter
from dure.records.usage import usage_path
from dure.strategies.contract.abilities import lost_shares
from dure.strategies.contract.step_facts import LostShare, Requests
from dure.terminal import one_line
from dure.torchcompat.gradients import observed_backwards
from dure.training.best_metric import Best
from dure.training.first_steps.in_one_process import OneProcessSteps
from dure.training.first_steps.values import NUM_STEPS
from dure.training.late_inspection import LateInspection
from dure.training.loop import Boundary, StepOutcome, TrainingLoop
from dure.training.memory_use import MemoryUse
from dure.training.progress import Progress
from dure.training.rehearsal import asked_schedule, rehearse_evaluation
from dure.training.run_state.capture import Progression
from dure.training.run_state.checkpoint_policy import Checkpointer
from dure.training.run_state.factor_check import FactorCheck
from dure.training.run_state.new_length import UsedFactors, differs_in_length, used_before
from dure.training.run_state.replica_check import ReplicaCheck
from dure.training.run_state.snapshot_policy import MemorySaver
from dure.training.seeds import chosen_by_timing
from dure.training.session.evaluation import evaluate
from dure.training.session.loader_copies import FOLLOWS_STATE, LoaderCopies
from dure.training.session.session import Session, check_parts, check_sync_batchnorm
from dure.training.session.stop_request import StopSignals
from dure.training.state_changes import StateChanges
from dure.training.step_samples import RankBatch

_MOST_RATES = 8
"""Number of parameter groups whose learning rates are recorded."""

Answer = TypeVar("Answer")


class Trainer:
    """Actions at the boundaries between steps: the loop computes, and this class decides what happens in between."""

    def __init__(
        self,
        session: Session,
        run: RunDir,
        stop: StopSignals,
        current_step: Callable[[int], None],
        current_phase: Callable[[str], None] = lambda _: None,
        begin_step: Callable[[int], None] | None = None,
        one_process_steps: OneProcessSteps | None = None,
    ) -> None:
        """Prepare the training run.

        Args:
            session: Session to train.
            run: Folder for the records.
            stop: Signals that request a stop.
            current_step: Called with the number of each completed step.
            current_phase: Called repeatedly with the current phase.
            begin_step: Called with the number of each step before it is computed.
            one_process_steps: First steps of the run in one process; None if they were not taken.
        """
        self.session = session
        self.run = run
        self.stop = stop
        self.current_step = current_step
        self.current_phase = current_phase
        self.begin_step = begin_step
        self.one_process_steps = one_process_steps or OneProcessSteps()
        self.is_restart = session.place.round > 0
        self.position = Progression()
        self.checkpointer = Checkpointer(session, run, self.position, self._event)
        self.replicas = ReplicaCheck(session, self.position, self._event, self.checkpointer.newest_name)
        self.factors = FactorCheck(session)
        self.used_factors = UsedFactors()
        trusted_samples = (lambda: self.replicas.agreed_samples) if self.replicas.heals else None
        self.memory = MemorySaver(
            session,
            self.position,
            session.place.snapshot_fds,
            session.spec.snapshot_every,
            self.checkpointer.warn,
            trusted_samples,
        )
        self.best = Best(session.spec.best_metric, session.spec.best_mode)
        self.last_metrics: dict[str, Metric] | None = None
        self.last_evaluation_time = time.time()
        self.changes = StateChanges(session)
        self.microbatch_under_way: Callable[[], int | None] = lambda: None
        """Function that returns the loop's microbatch under way; None while there is no loop."""

    @property
    def is_first(self) -> bool:
        """True if this rank acts for all ranks; another one does after the first was lost."""
        return self.session.group.rank == 0

    # the run

    def train(self) -> str:
        """Train from the newest valid checkpoint, or from the start; return `completed` or `interrupted`."""
        session, spec = self.session, self.session.spec
        with ExitStack() as resources:
            resources.push(self.checkpointer.leave)
            position, orders = self.position, session.place.orders
            trusted = orders.trusted_samples
            # before anything is loaded, as in a new run: it may set state that the task keeps
            before = session.kept.state_now()
            asked = session.task.build_schedule(session.strategy.optimizer, session.total_samples)
            self.changes.set_by_schedule(before.changed())
            session.kept.add_schedule(asked)
            self.loader_copies = LoaderCopies(session.train_loader, session.order, session.strategy.objects)
            self.checkpointer.go_on(self.memory, trusted)
            if orders.stopped_by is not None:
                return self._save_and_leave(orders.stopped_by)
            if trusted is not None:
                self._event(events.ReplicaHealed(step=position.step, samples_seen=position.samples_seen))
            self.current_step(position.step)
            check_sync_batchnorm(session, position.samples_seen)
            check_parts(session, position.samples_seen)
            self.late = LateInspection(session)
            self.memory_use = MemoryUse(session.strategy)
            self.is_memory_recorded = False
            self.replicas.begin()
            self.begun_at = (position.samples_seen, position.step)
            self.writer = resources.enter_context(RecordWriter(self.run.records_path(session.group.rank)))
            gpus = gpus_of(session.strategy.devices)
            resources.enter_context(UsageSampler(usage_path(self.run, session.group.rank), lambda: gpus))
            self.progress = Progress(
                session.total_samples,
                position.samples_seen,
                quiet=spec.quiet or not self.is_first,
                is_relayed_live=session.place.has_live_line,
            )
            resources.callback(self.progress.close)
            used = used_before(self.run.events(), session.total_samples) if self.is_first else {}
            asked_for = asked_schedule(session, asked, used if self.position.step else {})
            schedule = asked_for.schedule
            self.changes.set_by_schedule(asked_for.set_state)
            if session.data_state is not None:
                session.data_state.record()
            if not self.is_restart:  # a restart has passed it already, and its other ranks are waiting
                session.notes += rehearse_evaluation(session, self.best)
            if self._loaders_differ():  # those of an undisturbed run began before this state was set
                session.notes.append(FOLLOWS_STATE)
            if self.is_first:
                session.notes += differs_in_length(
                    self.position.samples_seen, session.order, has_other_factors=asked_for.gives_others
                )
            self._print_start()
            self.loop = TrainingLoop(
                session.strategy,
                session.train_loader,
                session.order,
                microbatch_size=spec.microbatch_size,
                schedule=self.used_factors.noted(self.factors.noted(schedule)),
                requested=self._requests,
                record_samples=spec.record_samples,
                skips_nonfinite=spec.on_nonfinite == "skip",
                begin_step=self.begin_step,
                before_change=self._before_change,
            )
            if spec.trace is not None:
                self._profile(spec.trace, resources)
            resources.enter_context(observed_backwards(self.loop.backwards))
            self.microbatch_under_way = self.loop.microbatch_under_way
            for model in session.strategy.evaluation_models():
                model.train()
            self.last_evaluation_time = time.time()
            if self.is_first:
                resources.enter_context(observed_backwards(BackwardOperations(self._note_operations)))
            try:
                return self._steps()
            except LossNotFinite:
                # a flipped bit may be the cause, and is then the error to report
                self.replicas.check(again=True)
                raise

    def _profile(self, num_steps: int, resources: ExitStack) -> None:
        """Profile the first steps of the loop after a few."""
        rank, begin = self.session.group.rank, self.begin_step
        profile = StepProfile(self.run.path, rank, num_steps, self.progress.print_lines)
        resources.callback(profile.close)

        def begin_step(number: int) -> None:
            profile.begin_step(number)
            if begin is not None:
                begin(number)

        self.loop.begin_step = begin_step

    def _save_and_leave(self, signal: int) -> str:
        """Save the loaded state, for ranks that were ended because they did not follow a stop signal."""
        if self.position.samples_seen:
            self.current_phase("saving")
            self._together(lambda: self.checkpointer.save(None, is_last=True))
        self._event(events.Interrupted(signal=signal))
        return "interrupted"

    def _note_factors(self) -> None:
        """Record factors of the schedule, for a resume with another length."""
        if (event := self.used_factors.event(self.session.total_samples)) is not None:
            self._event(event)

    def _note_operations(self, operations: int, least_seconds: float) -> None:
        self._event(events.OperationsCounted(operations=operations, least_seconds=least_seconds))

    def _before_change(self) -> float:
        """Finish pending reads of the weights before the optimiser changes them; return the seconds waited."""
        self.late.note_step()
        self.memory_use.note_step()
        self.changes.before_step()
        if self.changes.has_step_hooks:
            self.replicas.note_settings()
        return self.checkpointer.before_change() + self.memory.before_change()

    def _steps(self) -> str:
        session, position = self.session, self.position
        self.changes.note_optimizer()
        if self.checkpointer.must_save_best:
            self.last_metrics = self._recorded_metrics() if self.is_first else None
            self._save()
        for boundary in self.loop.boundaries(position.samples_seen, session.total_samples, position.step):
            before = position.samples_seen
            self.changes.after_step()
            position.samples_seen, position.step = boundary.batch.samples_seen, boundary.step
            self.current_step(boundary.step)
            requests = self._note(boundary.outcomes)
            if requests.stop:
                self._settle()
                self._save(is_last=True)
                self._note_factors()
                self._event(events.Interrupted(signal=self._agreed_signal()))
                return "interrupted"
            if self._are_first_steps_done(boundary):
                self._compare_first_steps()
            if self.replicas.is_due():
                self._compare()
            if self.factors.is_due(boundary.step):
                self._compare_factors()
            self._act(boundary, before, requests)
            if boundary.step == self.begun_at[1] + 1:
                self.checkpointer.prepare()
            if self.memory.is_due():
                # after all actions at this position, so that they are repeated if a rank dies during them
                self.memory.take(self._settle)
                self._declare_not_kept()
            self.changes.note_optimizer()
        self._settle()
        if position.samples_seen > position.evaluated_samples:
            every = self.session.spec.eval_every_epochs * self.session.order.epoch_samples
            last = max(position.evaluated_samples, 0)
            self._evaluate(is_extra=not _crossed(last, position.samples_seen, every))
        if session.eval_loader is None:
            self._print_epoch()
        self._save(is_last=True)
        self._note_factors()
        self.replicas.close()
        return "completed"

    def _recorded_metrics(self) -> dict[str, Metric] | None:
        """Return the metrics of the evaluation at this position from the record; None if it is not there."""
        found = [event for event in self.run.events() if isinstance(event, events.Evaluated)]
        here = [event.metrics for event in found if event.samples_seen == self.position.samples_seen]
        return here[-1] if here else None

    def _act(self, boundary: Boundary, before: int, requests: Requests) -> None:
        session, spec, seen = self.session, self.session.spec, boundary.batch.samples_seen
        epoch_samples = session.order.epoch_samples
        is_epoch_end = boundary.batch.epoch_samples == epoch_samples
        is_evaluation = session.eval_loader is not None and _crossed(
            before, seen, spec.eval_every_epochs * epoch_samples
        )
        is_late_request = boundary.step - self.checkpointer.last_step <= self.loop.lag
        is_save = is_epoch_end or (
            spec.checkpoint.every_samples is not None and _crossed(before, seen, spec.checkpoint.every_samples)
        )
        if requests.save and not is_late_request:
            # requested by a clock, or by a rank whose part of the last checkpoint could not be written
            is_save = self._together(self.checkpointer.settle) is not False or is_save
        if not (is_evaluation or is_save) or seen >= session.total_samples:
            return
        self._settle()
        if is_evaluation:
            self._evaluate()
        if is_epoch_end and session.eval_loader is None:
            self._print_epoch()
        if is_save:
            self._save()
        self.loop.restart_clock()

    def _are_first_steps_done(self, boundary: Boundary) -> bool:
        """Return whether this step is the last of those that were taken in one process too, the same on all ranks."""
        is_end = boundary.batch.samples_seen >= self.session.total_samples
        is_last = boundary.step == NUM_STEPS or (is_end and boundary.step < NUM_STEPS)
        strategy = self.session.strategy
        return is_last and self.begun_at[1] == 0 and strategy.is_synchronous and strategy.info.is_exact

    def _compare_first_steps(self) -> None:
        self._settle()
        found = self._together(lambda: self.one_process_steps.compare(self.session, self.late.declared))
        if self.is_first and found.declaration is not None:
            self.late.declare([found.declaration])
            self._event(events.NotPreserved(texts=(found.declaration,)))
            self.progress.print_lines(found.declaration)
        elif found.num_tensors:
            step, num_tensors = self.position.step, found.num_tensors
            self._event(events.FirstStepsCompared(steps=step, tensors=num_tensors))
            steps = "the first step agrees" if step == 1 else f"the first {step} steps agree"
            self.progress.print_lines(f"{steps} with one process: {num_tensors} tensors of weights and optimiser")
        self.loop.restart_clock()

    def _compare(self) -> None:
        try:
            self.replicas.check()
        except ReplicasDiverged:
            self._settle()
            raise

    def _compare_factors(self) -> None:
        self._together(lambda: self.factors.check(self.position.step))

    def _settle(self) -> None:
        """Read the facts of every launched step before weights are read."""
        self._note(self.loop.drain())
        self.writer.flush()

    def _note(self, outcomes: list[StepOutcome]) -> Requests:
        requests = Requests()
        for outcome in outcomes:
            record = self._with_rates(outcome.record)
            self.writer.write(record)
            self.position.loss_sum += record.loss_sum
            self.position.loss_count += record.loss_count
            self.progress.step(record)
            if self.memory.is_measuring:
                self.memory.note(record.wall_seconds)
            if outcome.skipped is not None:
                self._print_skipped(record.step, outcome.skipped)
            requests = outcome.requests
        return requests

    def _with_rates(self, record: StepRecord) -> StepRecord:
        """Return a record with the learning rates, if the run is handed over to a tracker, which shows them."""
        if not (self.is_first and self.session.spec.trackers):
            return record
        groups = self.session.strategy.optimizer.param_groups[:_MOST_RATES]
        rates = {f"{RATES}.{index}" if index else RATES: float(group["lr"]) for index, group in enumerate(groups)}
        return record._replace(measured={**(record.measured or {}), **rates})

    def _requests(self) -> Requests:
        is_asking = self.checkpointer.is_asking()
        if self.stop.received is None and not is_asking:
            return _NOTHING
        return Requests(stop=self.stop.received is not None, save=is_asking)

    def _agreed_signal(self) -> int:
        received = max(self._together(lambda: self.session.group.all_gather_json(self.stop.received or 0)))
        self.stop.received = received
        return int(received)

    # what all ranks do together

    def _together(self, action: Callable[[], Answer]) -> Answer:
        """Run a collective action, and repeat it without a rank lost meanwhile, if the run can continue without it."""
        while True:
            try:
                return action()
            except GroupShrank:
                continue

    def _save(self, *, is_last: bool = False) -> None:
        self._compare()
        self._compare_factors()
        self.current_phase("saving")
        self._together(lambda: self.checkpointer.save(self.last_metrics, is_last=is_last))
        self.current_phase("training")
        found = [*self.changes.declared_of_evaluations(), *self._newly_not_kept()]
        step = self.position.step
        if texts := self._together(lambda: self.late.new_declarations(step, found=found, is_last=is_last)):
            self._event(events.NotPreserved(texts=tuple(texts)))
        if self._loaders_differ():
            self._event(events.NotPreserved(texts=(FOLLOWS_STATE,)))
        if is_last or not self.is_memory_recorded:
            self.is_memory_recorded = True
            self._record_memory()
        if lost := lost_shares(self.session.strategy):
            self._report_lost(lost)

    def _record_memory(self) -> None:
        group = self.session.group
        used = self._together(lambda: group.all_gather_json(asdict(self.memory_use.now(group.rank))))
        self._event(events.memory_used(used))

    def _loaders_differ(self) -> bool:
        """Return whether loader processes read other samples than this one, which nothing declares; True only once."""
        traits = self.session.strategy.traits
        return self.is_first and not (traits.data_changes or traits.copied_state) and self.loader_copies.differ()

    def _declare_not_kept(self) -> None:
        """Declare what the first rank has found; what others have is gathered with the next checkpoint."""
        if self.is_first and (texts := self._newly_not_kept()):
            self.late.declare(texts)
            self._event(events.NotPreserved(texts=tuple(texts)))

    def _newly_not_kept(self) -> list[str]:
        """Return declarations, once each, of state that no checkpoint holds, or that the loss began to change late."""
        not_kept, began = self.changes.new_declarations()
        for text in not_kept:
            self.progress.print_lines(f"{text} (give the task state_dict() and load_state_dict())")
        return [*not_kept, *began]

    def _report_lost(self, lost: list[LostShare]) -> None:
        """Record exactly which samples were not used because their rank died."""
        samples_seen, step = self.begun_at
        last = max(share.step for share in lost)
        found: list[events.UnusedShare] = []
        batches = self.session.order.batches(samples_seen, self.session.total_samples)
        for number, batch in enumerate(batches, step + 1):
            if number > last:
                break
            found += [
                events.UnusedShare(
                    rank=share.rank,
                    step=number,
                    epoch=batch.epoch,
                    samples_seen=batch.samples_seen,
                    samples=tuple(RankBatch.of(batch, share.data_rank, share.data_world_size, None).indices.tolist()),
                    is_partly_used=share.is_partly_used,
                )
                for share in lost
                if share.step == number
            ]
        for rank in dict.fromkeys(share.rank for share in lost):
            shares = tuple(share for share in found if share.rank == rank)
            self._event(events.RankLost(rank=rank, samples_seen=self.position.samples_seen, shares=shares))
            count = sum(len(share.samples) for share in shares)
            self.progress.print_lines(
                f"rank {rank} was lost, and {count} samples of its shares: rank_lost in events.jsonl"
            )

    # evaluation

    def _evaluate(self, *, is_extra: bool = False) -> None:
        """Evaluate, and record the result.

        Args:
            is_extra: Whether a longer run would not evaluate here, so that the evaluation must leave no state behind.
        """
        session, position = self.session, self.position
        if session.eval_loader is None:
            return
        start = time.perf_counter()
        loader = session.eval_loader
        with self.changes.evaluation(is_undone=is_extra):
            metrics = self._together(
                lambda: evaluate(
                    session.task,
                    session.strategy,
                    loader,
                    num_samples=session.eval_samples,
                    batch_size=session.eval_batch_size,
                    on_batch=lambda: self.current_phase("evaluating"),
                )
            )
        self.late.note_evaluation()
        self.current_phase("training")
        train_loss = position.loss_sum / position.loss_count if position.loss_count else None
        epochs = round(position.samples_seen / session.order.epoch_samples, 4)
        is_best = self._note_best(metrics)
        now = time.time()
        self._event(
            events.Evaluated(
                step=position.step,
                samples_seen=position.samples_seen,
                epochs=epochs,
                train_loss=train_loss,
                metrics=metrics,
                is_best=is_best,
                best_metric=session.spec.best_metric,
                seconds=time.perf_counter() - start,
                seconds_since_last=now - self.last_evaluation_time,
            )
        )
        self.progress.evaluated(metrics, epochs, train_loss)
        position.loss_sum = position.loss_count = 0.0
        position.evaluated_samples, self.last_metrics, self.last_evaluation_time = position.samples_seen, metrics, now
        if is_best:
            # the best weights must be on disk before training changes them
            self._save()

    def _print_epoch(self) -> None:
        """Show the training loss of the finished epoch, if no evaluation shows it."""
        position = self.position
        epochs = round(position.samples_seen / self.session.order.epoch_samples, 4)
        if position.loss_count:
            self.progress.print_lines(f"epoch {epochs:g}  train loss {position.loss_sum / position.loss_count:.4f}")
        position.loss_sum = position.loss_count = 0.0

    def _note_best(self, metrics: dict[str, Metric]) -> bool:
        value, before = self.best.value_of(metrics), self.position.best
        if before is not None and before["metric"] != self.best.metric:
            before = None  # the run was resumed with another metric for the best
        is_best = self.best.is_better(value, None if before is None else before["value"])
        if is_best:
            seen = self.position.samples_seen
            self.position.best_before = before
            self.position.best = {"metric": self.best.metric, "value": value, "samples_seen": seen}
        return is_best

    # reports

    def _print_start(self) -> None:
        session, spec, strategy = self.session, self.session.spec, self.session.strategy
        self._event(
            events.Training(
                world_size=session.group.world_size,
                num_devices=spec.num_devices,
                device=strategy.device.type,
                transport=session.group.transport,
                cores=count_cores(),
                epoch_samples=session.order.epoch_samples,
                total_samples=session.total_samples,
                samples_seen=self.position.samples_seen,
                step=self.position.step,
                is_restart=self.is_restart,
                not_preserved=(
                    *strategy.not_preserved(),
                    *self._not_preserved_by_halving(),
                    *chosen_by_timing(strategy.device.type, self.position.step),
                    *session.notes,
                ),
            )
        )
        if not self.is_first:
            return
        if self.is_restart:
            step = self.position.step
            self.progress.print_lines(f"going on after step {step}" if step else "beginning again with the first step")
            return
        devices = f"{spec.num_devices} x {strategy.device.type}"
        through = f" through {session.group.transport}" if session.group.world_size > 1 else ""
        self.progress.print_lines(
            f"{type(session.task).__name__}: {strategy.info.name} on {devices}{through}\n"
            f"{session.order.num_samples:,} samples, global batch {spec.global_batch_size}, seed {spec.seed}\n"
            f"run folder {one_line(self.run.path)}"
        )
        if self.position.step:
            self.progress.print_lines(
                f"resumed at step {self.position.step}, {self.position.samples_seen:,} samples seen"
            )
        if self.position.samples_seen >= session.total_samples:
            self.progress.print_lines(
                "nothing is left to do: the run has its full length already; give more --epochs to continue"
            )
        for line in strategy.describe():
            self.progress.print_lines(line)
        if strategy.device.type == "cpu" and (ratio := slowdown_of_threads()) is not None:
            self._event(events.SlowThreads(threads=session.place.threads, slowdown=ratio))
            self.progress.print_lines(
                f"the {session.place.threads} threads of a rank wait for cores that other work uses: small operations "
                f"take {ratio:,.0f} times as long as with one, so --threads 1 may be much faster"
            )
        text = session.task.describe(strategy.model)
        if text:
            self.progress.print_lines(text)

    def _not_preserved_by_halving(self) -> list[str]:
        size = self.session.place.orders.microbatch_size
        if size is None or not self.session.strategy.not_preserved():
            return []
        return [f"microbatches: of at most {size} samples, made smaller when memory ran out"]

    def _print_skipped(self, step: int, cause: LossNotFinite) -> None:
        self._event(events.StepSkipped(step=step, message=str(cause), culprits=tuple(map(dict, cause.culprits))))
        self.progress.print_lines(f"step {step} was skipped: {cause}")

    def _event(self, event: events.Event) -> None:
        if self.is_first:
            SPACE_WAIT.write(lambda: self.run.append_event(event))


_NOTHING = Requests()


def _crossed(before: int, after: int, interval: float) -> bool:
    """Return whether a multiple of the interval lies in (before, after]."""
    return after // interval > before // interval
