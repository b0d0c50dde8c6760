"""The entry of a worker process: one rank of one job, from joining the others to an ordered end."""

import gc
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dure.comm.groups import Group
from dure.errors import DureError, LossNotFinite, Misuse
from dure.rank import Place
from dure.rundir import RunDir
from dure.spec import RunSpec
from dure.torchcompat import import_late_parts
from dure.training.checkpoint import Checkpoint, CheckpointStore
from dure.training.evaluation import evaluate
from dure.training.failure import describe_failure
from dure.training.load_task import load_task_class
from dure.training.session import Session, evaluation_data_or_refuse, open_rank_group, open_session
from dure.training.stop import StopSignals
from dure.training.train import Conductor


class Worker:
    """One rank's work on a job.

    A job is plain JSON: `{"kind": "train", "run": folder}`, or `{"kind": "evaluate", "run": folder, "spec": {...},
    "which": "best" | "last", "answer": file}`.
    """

    def __init__(self, job: Mapping[str, Any], place: Place) -> None:
        self.job = job
        self.place = place
        self.run = RunDir.open(Path(job["run"]))
        self.step: int | None = None

    def main(self) -> int:
        """Do the job; return the exit code, with what went wrong written into the run folder."""
        group: Group | None = None
        try:
            with StopSignals() as stop:
                spec = RunSpec.model_validate(self.job["spec"]) if "spec" in self.job else self.run.read_spec()
                group, devices = open_rank_group(spec, self.place)
                session = open_session(spec, self.place, group, devices)
                if self.job["kind"] == "train":
                    self._train(Conductor(session, self.run, stop, self._note_step))
                else:
                    self._evaluate(session)
                session.strategy.close()
                del session
                # DDP's reducer holds the process group in reference cycles: it must be gone before the group is
                gc.collect()
                group.close()
                return 0 if stop.received is None or self.job["kind"] != "train" else 128 + stop.received
        except BaseException as error:
            return self._fail(error, group)

    def _train(self, conductor: Conductor) -> None:
        conductor.train()
        if conductor.loop.strategy.group.rank == 0 and conductor.stop.received is None:
            self.run.append_event("completed", samples_seen=conductor.position.samples_seen)

    def _evaluate(self, session: Session) -> None:
        loader = evaluation_data_or_refuse(session)
        store = CheckpointStore(self.run.checkpoints, 1, lambda text: print(f"dure: {text}", file=sys.stderr))
        path = None
        if session.group.rank == 0:
            path = store.best() if self.job["which"] == "best" else store.newest_valid()
        name = session.group.all_gather_json(None if path is None else path.name)[0]
        if name is None:
            raise Misuse(f"{self.run.path} has no usable checkpoint: train it further with `dure train --resume`")
        checkpoint = Checkpoint(self.run.checkpoints / name, weights_only=True)
        checkpoint.load_model(session.strategy.model)
        metrics = evaluate(
            session.task,
            session.strategy,
            session.group,
            loader,
            num_samples=session.eval_samples,
            batch_size=session.eval_batch_size,
        )
        if session.group.rank == 0:
            answer = {
                "checkpoint": name,
                "samples_seen": checkpoint.position.samples_seen,
                "step": checkpoint.position.step,
                "metrics": {name: asdict(metric) for name, metric in metrics.items()},
                "world_size": session.group.world_size,
                "num_devices": session.group.world_size * len(session.strategy.devices),
            }
            self.run.write_json(self.job["answer"], answer)

    def _note_step(self, step: int) -> None:
        self.step = step

    def _fail(self, error: BaseException, group: Group | None) -> int:
        rank = self.place.rank.rank
        failure = describe_failure(error, rank, self.step)
        self.run.write_json(failure_file(rank), failure)
        if isinstance(error, LossNotFinite):
            self.run.append_event("loss_not_finite", rank=rank, step=self.step, culprits=list(error.culprits))
        if rank > 0 and not isinstance(error, DureError):
            print(failure["traceback"], file=sys.stderr, flush=True)
        return int(failure["exit_code"])


def failure_file(rank: int) -> str:
    """Return the name of the record that a failed rank leaves in the run folder."""
    return f"logs/failure-rank{rank}.json"


def main(job: Mapping[str, Any], place: Place) -> int:
    """Run one rank in this process and return its exit code."""
    return Worker(job, place).main()


def before_fork(job: Mapping[str, Any]) -> None:
    """Import once, in the process that forks the ranks, what all of them need."""
    import_late_parts()
    spec = job.get("spec") or RunDir.open(Path(job["run"])).read_spec().model_dump()
    load_task_class(spec["task"])
