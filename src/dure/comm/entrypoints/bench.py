"""Entry point of a rank of `dure bench`: join the group, measure, leave."""

import json
import time
from pathlib import Path

import torch

from dure.comm.groups import open_group
from dure.comm.timing import measure
from dure.failures.report import describe_failure, write_failure
from dure.host.device_kinds import device_kind
from dure.process.context import Place
from dure.process.jobs import BenchJob
from dure.terminal import LiveLine
from dure.torchcompat.imports import import_late_parts
from dure.units import format_bytes


def main(job: BenchJob, place: Place) -> int:
    """Run the job's measurements; rank 0 appends each row to the job's file as a line of JSON once it is measured."""
    try:
        kind = job.device
        device = torch.device(kind, place.rank.local_rank) if device_kind(kind).has_several else torch.device(kind)
        if device_kind(kind).has_several:
            torch.accelerator.set_device_index(device)
        torch.set_num_threads(place.threads)
        group = open_group(
            place.rank, place.store, device=device, backend=job.backend, timeout_seconds=job.timeout_seconds
        )
        line = LiveLine()
        with Path(job.rows).open("a", encoding="utf-8") as file:
            for row in measure(group, device, job.plan):
                if place.rank.rank == 0:
                    if line.is_live:
                        line.show(f"{row.collective} {row.algorithm} {format_bytes(row.num_bytes)}")
                    file.write(json.dumps({**row.to_json(), "time": time.time()}) + "\n")
                    file.flush()
        if place.rank.rank == 0:
            line.close()
        group.close()
    except BaseException as error:
        failure = describe_failure(error, place.rank.rank, None)
        write_failure(failure, place.report_fd)
        return failure.exit_code
    return 0


def before_fork(job: BenchJob) -> None:
    """Import, in the process that forks the ranks, what all of them need."""
    import_late_parts()
