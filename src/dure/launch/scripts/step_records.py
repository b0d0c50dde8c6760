"""Records of a script's steps, as those of a task: one file for each rank, and an event with what is known of it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dure.process.context import Place
from dure.process.jobs import ScriptJob
from dure.terminal import one_line, print_status

if TYPE_CHECKING:
    from dure.measure.script_steps import ScriptFacts


def record_steps(folder: Path, job: ScriptJob, place: Place) -> Callable[[], None]:
    """Record the steps of this process from now on; return a function that writes the last ones.

    The records of an earlier round are kept under another name, because a script that was started again counts from 1.
    """
    from dure.host.devices import count_cores
    from dure.measure.script_steps import ScriptSteps
    from dure.measure.usage_samples import UsageSampler, current_gpus
    from dure.records.events import OperationsCounted, ScriptTraining
    from dure.records.run_dir import RunDir
    from dure.records.step_writer import RecordWriter
    from dure.records.usage import usage_path

    run, rank = RunDir(folder), place.rank
    path = run.records_path(rank.rank)

    def tell(facts: "ScriptFacts") -> None:
        if rank.rank:
            return
        run.append_event(
            ScriptTraining(
                world_size=rank.world_size,
                num_nodes=job.num_nodes,
                nproc=rank.local_world_size,
                device=facts.device,
                backend=facts.backend,
                cores=count_cores(),
                threads=facts.threads,
                batch_size=facts.batch_size,
                num_workers=facts.num_workers,
            )
        )

    def count(operations: int, least_seconds: float) -> None:
        if not rank.rank:
            run.append_event(OperationsCounted(operations=operations, least_seconds=least_seconds))

    try:
        if place.round and path.is_file():
            os.replace(path, path.with_name(f"round{place.round - 1}-{path.name}"))
        writer = RecordWriter(path)
    except OSError as error:  # the script can do without
        print_status(f"dure: rank {rank.rank} records no steps: {one_line(error)}")
        return lambda: None
    profile = None
    if job.trace is not None:
        from dure.measure.step_profile import StepProfile

        profile = StepProfile(folder, rank.rank, job.trace, lambda text: print_status(f"dure: {text}"))
    steps = ScriptSteps(writer, rank.world_size, tell, count, profile)
    try:
        steps.install()
    except Exception as error:  # another torch may lack what is observed
        steps.stop()
        print_status(f"dure: rank {rank.rank} records no steps: {one_line(error)}")
    usage = UsageSampler(usage_path(run, rank.rank), current_gpus).start()

    def close() -> None:
        usage.close()
        steps.close()

    return close
