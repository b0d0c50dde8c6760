"""Entry point of a worker process: one rank of one job, from joining the others to an orderly end."""

import gc
import importlib
import json
import multiprocessing.util
import os
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from dure.comm.groups import Group
from dure.errors import DureError, LossNotFinite, Misuse, RunInvalid, TaskInvalid
from dure.failures.device_errors import AskDriver
from dure.failures.record import FailureRecord, failure_file, failure_to_json
from dure.failures.report import describe_failure, is_peer_lost, report_undisturbed, told, write_failure_report
from dure.host.device_kinds import device_kind
from dure.process.context import CUT, Place
from dure.process.heartbeat import Heartbeats
from dure.process.jobs import EvaluateJob, TrainJob
from dure.process.own_descriptors import refusing_to_close_ranges
from dure.process.stop_signals import stop_exit_code
from dure.records import events
from dure.records.run_dir import RunDir
from dure.spec import RunSpec
from dure.strategies.contract import abilities
from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.contract.replica_state import replica_of
from dure.strategies.contract.strategy import Strategy
from dure.strategies.state.tensor_shard import Needs, rectangles
from dure.strategies.table import load_strategy
from dure.terminal import print_status, print_traceback
from dure.torchcompat.calls import SequenceNumber
from dure.torchcompat.imports import import_late_parts
from dure.training.checkpoints.reader import Checkpoint
from dure.training.checkpoints.store import CheckpointStore
from dure.training.fault_injection import PlannedFaults, read_faults
from dure.training.first_steps.in_one_process import OneProcessSteps
from dure.training.session.evaluation import evaluate
from dure.training.session.initial_draws import InitialDraws
from dure.training.session.session import (
    Session,
    check_ranks_agree,
    evaluation_data_or_refuse,
    open_rank_group,
    open_session,
)
from dure.training.session.stop_request import StoppedAtOnce, StopSignals
from dure.training.task.digests import class_digest
from dure.training.task.given_task import task_class
from dure.training.trainer import Trainer

LOSS_TRAITS = "loss_traits.json"
"""File in the run's folder with the traits that an inspection of the loss found."""
INITIAL_DRAWS = "initial_draws.json"
"""File in the run's folder with the draws of the build of a large model."""


class Worker:
    """Work of one rank on a job."""

    def __init__(self, job: TrainJob | EvaluateJob, place: Place) -> None:
        self.job = job
        self.place = place
        self.run = RunDir.open(Path(job.run))
        self.step: int | None = None
        self.heartbeats = _heartbeats(place)
        self.sequence = SequenceNumber()
        self.faults: PlannedFaults | None = None
        self.microbatch_size: int | None = None
        """Samples that a device computed at once in the failed step; None if no step failed."""
        self.group: Group | None = None
        self.gpus: tuple[int, ...] = ()
        """GPUs of this rank on which NVML reports, by their indices in this process."""

    def main(self) -> int:
        """Run the job; return the exit code, after any failure is written into the run's folder."""
        stop = StopSignals(is_supervised=self.place.is_supervised)
        try:
            with stop, refusing_to_close_ranges():
                return self._work(stop)
        except BaseException as error:
            failure = error
            try:
                stop.defer()  # the process is ending, and a signal now must not prevent its report
            except StoppedAtOnce:  # a signal was already due; `_fail` sees it
                stop.defer()
            code = report_undisturbed(lambda: self._fail(failure, stop))
            # frames keep the model, DDP and loader processes alive, and these the process group
            traceback.clear_frames(error.__traceback__)
        self._leave_disorderly()
        return code

    def _work(self, stop: StopSignals) -> int:
        spec = self._spec()
        self.group, devices = open_rank_group(spec, self.place)
        self.gpus = tuple(device.index for device in devices if device_kind(device.type).has_nvml)
        job = self.job
        if isinstance(job, TrainJob) and job.asked is not None:
            check_ranks_agree(self.group, job.asked)
        self._check_task_code(spec)
        if spec.faults is not None and isinstance(job, TrainJob):
            # ranks of all hosts together
            faults = read_faults(spec.faults, max(self.run.read_spec().num_devices, self.group.world_size))
            self.faults = PlannedFaults(faults, self.place.rank.rank, self.run, self._cut)
        around_loss = None if self.faults is None else self.faults.around
        draws, known_traits = self._known_draws(), self._known_traits()
        steps = OneProcessSteps()
        take_steps = steps.take if isinstance(job, TrainJob) and self._is_first_attempt() else None
        session = open_session(spec, self.place, self.group, devices, around_loss, known_traits, draws, take_steps)
        self.group = session.group
        if isinstance(job, TrainJob) and self.group.rank == 0:
            if session.strategy.traits != known_traits:  # written once: at a restart the disk may be full
                self.run.write_json(LOSS_TRAITS, asdict(session.strategy.traits))
            if draws.is_new:
                self.run.write_json(INITIAL_DRAWS, draws.to_json())
        if self.faults is not None:
            self.faults.take(_own_parameters(session.strategy))
        is_interrupted = False
        if isinstance(job, TrainJob):
            is_interrupted = self._train(session, stop, steps)
        else:
            self._evaluate(job, session)
        session.strategy.close()
        del session
        # DDP's reducer holds the process group in reference cycles, and must be freed before the group
        gc.collect()
        self.group.close()
        return stop_exit_code(stop.received or self.place.orders.stopped_by or 0) if is_interrupted else 0

    def _known_traits(self) -> LossTraits | None:
        """Return the traits of the loss found by this attempt's first ranks, or None; an evaluation needs none."""
        if isinstance(self.job, EvaluateJob):
            return LossTraits()
        if self.place.round == 0 or not (self.run.path / LOSS_TRAITS).is_file():
            return None
        return LossTraits.from_json(self.run.read_json(LOSS_TRAITS))

    def _known_draws(self) -> InitialDraws:
        """Return the recorded draws of the model's build; without any if there are none that can be read."""
        try:
            return InitialDraws.from_json(self.run.read_json(INITIAL_DRAWS))
        except RunInvalid:
            return InitialDraws()

    def _check_task_code(self, spec: RunSpec) -> None:
        """Refuse a class that this process imported again, if the process that started the run had changed it.

        Raises:
            TaskInvalid: The two differ.
        """
        if self.job.task_code not in (None, class_digest(task_class(spec.task))):
            name = spec.task.rpartition(":")[2]
            raise TaskInvalid(
                f"{name} is not the same in the process that starts the run as in its file, which a spawned rank reads "
                "(a method or a constant was replaced after the import): use --start fork, or write it into the file"
            )

    def _spec(self) -> RunSpec:
        """Return the requested spec, adapted to the available devices and to the microbatch size that memory allows."""
        spec = _spec_of(self.job, self.run)
        changed: dict[str, int] = {}
        if self.place.is_on_several_hosts:
            changed["total_devices"] = self.place.rank.world_size  # some hosts may be lost
        if self.place.orders.microbatch_size is not None:
            changed["microbatch_size"] = self.place.orders.microbatch_size
        return spec.model_copy(update=changed) if changed else spec

    def _is_first_attempt(self) -> bool:
        """Return whether training begins with the first step."""
        return self.place.round == 0 and not CheckpointStore(self.run.checkpoints, 1, print_status).positions()

    def _train(self, session: Session, stop: StopSignals, steps: OneProcessSteps) -> bool:
        """Train; return whether a signal stopped it before the end."""
        begin_step = None if self.faults is None else self.faults.begin_step
        trainer = Trainer(session, self.run, stop, self._note_step, self._note_phase, begin_step, steps)
        stop.defer()
        try:
            status = trainer.train()
        except BaseException:
            self.microbatch_size = trainer.microbatch_under_way()
            raise
        if session.group.rank == 0 and status == "completed":
            missed = None if self.faults is None else self.faults.never_came(trainer.position.step)
            if missed is not None:
                trainer.checkpointer.warn(missed)
            self.run.append_event(events.Completed(samples_seen=trainer.position.samples_seen))
        return status == "interrupted"

    def _cut(self, seconds: float) -> None:
        """Ask the launcher to make this host silent, and return when it has."""
        assert self.place.report_fd is not None
        os.pwrite(self.place.report_fd, json.dumps({CUT: seconds}).encode(), 0)
        while os.fstat(self.place.report_fd).st_size:
            time.sleep(0.001)

    def _evaluate(self, job: EvaluateJob, session: Session) -> None:
        loader = evaluation_data_or_refuse(session)
        store = CheckpointStore(self.run.checkpoints, 1, print_status)
        path = None
        if session.group.rank == 0:
            path = store.best() if job.which == "best" else store.newest_valid()
        name = session.group.all_gather_json(None if path is None else path.name)[0]
        if name is None:
            further = f"train it further with `{self.run.resume_command}`"
            raise Misuse(f"{self.run.path} has no usable checkpoint: {further}")
        model = session.strategy.model
        needs = Needs(model=rectangles(model.state_dict().items()), optimizer={})
        checkpoint = Checkpoint.read(self.run.checkpoints / name, weights_only=True, needs=needs)
        checkpoint.load_model(model)
        metrics = evaluate(
            session.task,
            session.strategy,
            loader,
            num_samples=session.eval_samples,
            batch_size=session.eval_batch_size,
        )
        if session.group.rank == 0:
            changed = session.identity.changes_since(checkpoint.extra.get("identity", {}))
            if changed:
                print_status(
                    f"{' and '.join(changed)} changed since {name} was saved: this is measured with what is there now"
                )
            answer = {
                "checkpoint": name,
                "changed": changed,
                "samples_seen": checkpoint.position.samples_seen,
                "step": checkpoint.position.step,
                "metrics": {name: asdict(metric) for name, metric in metrics.items()},
                "world_size": session.group.world_size,
                "num_devices": session.group.world_size * len(session.strategy.devices),
            }
            self.run.write_json(job.answer, answer)

    def _note_step(self, step: int) -> None:
        self.step = step
        self._note_phase("training")

    def _note_phase(self, phase: str) -> None:
        if self.heartbeats is not None and self.step is not None:
            self.heartbeats.beat(self.place.rank.rank, self.step + 1, phase, self.sequence.now())

    def _fail(self, error: BaseException, stop: StopSignals) -> int:
        if stop.raised is not None:
            return stop_exit_code(stop.raised)
        if stop.received is not None and is_peer_lost(error):
            return stop_exit_code(stop.received)  # the other rank followed the same signal a moment earlier
        rank, error = self.place.rank.rank, told(error)

        def describe(ask_driver: AskDriver | None) -> FailureRecord:
            return describe_failure(error, rank, self.step, self.microbatch_size, self.gpus, ask_driver)

        failure = write_failure_report(describe, self.place.report_fd)
        with suppress(DureError):  # a full disk is reported through the descriptor
            self.run.write_json(failure_file(rank), failure_to_json(failure))
            # one rank records it: the first whose loss was not finite, because the others may not know
            if isinstance(error, LossNotFinite) and rank == error.culprits[0]["rank"]:
                found = tuple(map(dict, error.culprits))
                self.run.append_event(events.LossNotFinite(message=str(error), culprits=found))
        if rank > 0 and self.place.is_supervised and not isinstance(error, DureError):
            print_traceback(failure.traceback)
        return failure.exit_code

    def _leave_disorderly(self) -> None:
        """Leave the group without the others if this process lives on; a supervised one just exits."""
        if self.group is not None and not self.place.is_supervised:
            gc.collect()
            self.group.abandon()


def _own_parameters(strategy: Strategy) -> dict[str, Tensor]:
    """Return this rank's shard of the parameters."""
    replica = replica_of(strategy)
    if replica is not None:
        return {name: replica.tensors[name] for name, _ in strategy.model.named_parameters() if name in replica.tensors}
    return {name: parameter.detach() for name, parameter in strategy.model.named_parameters()}


def _heartbeats(place: Place) -> Heartbeats | None:
    return None if place.heartbeat_fd is None else Heartbeats(place.heartbeat_fd, place.rank.world_size)


def _spec_of(job: TrainJob | EvaluateJob, run: RunDir) -> RunSpec:
    return RunSpec.model_validate(job.spec) if isinstance(job, EvaluateJob) else run.read_spec()


def main(job: TrainJob | EvaluateJob, place: Place) -> int:
    """Run one rank in this process and return its exit code."""
    return Worker(job, place).main()


def before_fork(job: TrainJob | EvaluateJob) -> None:
    """Import, in the process that forks the ranks, what all of them need."""
    import_late_parts()
    spec = _spec_of(job, RunDir.open(Path(job.run)))
    task_class(spec.task)
    abilities.import_late_parts(load_strategy(spec.strategy))
    importlib.import_module("dure.comm.dure_shm.backend")  # transport between CPU ranks of one host
    if spec.num_workers:
        # directory of the loaders' sockets: created here, this process removes it even if they and their rank were
        # killed
        multiprocessing.util.get_temp_dir()
