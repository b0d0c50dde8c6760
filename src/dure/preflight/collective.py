"""Real collective of the ranks of a planned run, started in the same way as a run, within a time limit."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dure.checked import Number, Rank, Text
from dure.documents import parse_json
from dure.errors import Interrupted
from dure.failures.verdict import WorkerEnd, in_brief, worded
from dure.host.backends import backend_name
from dure.host.devices import count_accelerators, count_cores
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.outcome import Outcome
from dure.launch.rounds.request import Launch
from dure.launch.rounds.supervisor import run_workers
from dure.launch.worker.child import Output
from dure.launch.worker.worker_process import unnamed_file
from dure.preflight.findings import Finding, failure, ok
from dure.preflight.node_records import record_of_node
from dure.preflight.settings import PreflightSettings
from dure.process.jobs import PreflightJob
from dure.process.stop_signals import stop_exit_code
from dure.terminal import few
from dure.units import format_seconds

ENTRY = "dure.comm.entrypoints.preflight"
NAME = "collective"
_PART_OF_LIMIT = 0.6
"""Fraction of the time limit that one call may take: a rank that waits in vain reports it before all are ended."""
_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """Progress of one rank."""

    rank: Rank
    done: tuple[Text, ...] = ()
    at: Text | None = None
    """Step that it began and did not finish; None before the first, and after the last."""
    wrong: tuple[Text, ...] = ()
    """Descriptions of wrong results."""
    seconds: dict[Text, Number] = field(default_factory=dict)
    """Seconds of each finished step, by its name."""

    @property
    def is_through(self) -> bool:
        return "leaving" in self.done


@dataclass(frozen=True, kw_only=True)
class NodeProgress:
    """Progress of the ranks of one node."""

    seconds: Number
    """Seconds from the start of its ranks to their end."""
    ranks: tuple[RankProgress, ...]


def backend_of(settings: PreflightSettings, world_size: int) -> str:
    """Return torch's name of the backend that the ranks of such a run use."""
    is_one_host = settings.num_nodes == 1 and world_size > 1
    sends_from_devices = not settings.share_devices
    return backend_name(
        settings.backend, settings.device, is_one_host=is_one_host, sends_from_devices=sends_from_devices
    )


def try_collective(
    settings: PreflightSettings,
    names: Sequence[str],
    gather: Callable[[Any], list[Any]],
    nodes: Nodes | None = None,
    *,
    entry: str = ENTRY,
) -> list[Finding]:
    """Start the ranks, and judge the progress of each.

    Args:
        settings: The planned run.
        names: Name of each node.
        gather: Returns the values of all nodes, by node.
        nodes: All nodes; None for a single one.
        entry: Module of a rank's entry point.

    Raises:
        Interrupted: A signal stopped it.
    """
    nodes = nodes or Nodes.alone(settings.num_ranks)
    backend = backend_of(settings, nodes.world_size)
    began = time.perf_counter()
    files = [unnamed_file(f"dure-preflight{rank}") for rank in nodes.own_ranks]
    try:
        outcome = _run(settings, backend, files, nodes, entry)
        mine = [read_progress(file, rank) for rank, file in zip(nodes.own_ranks, files, strict=True)]
    finally:
        for file in files:
            os.close(file)
    seconds = time.perf_counter() - began
    if outcome.stopped_by is not None:
        raise Interrupted("the preflight was stopped", stop_exit_code(outcome.stopped_by))
    nodes.reset()
    gathered = gather(asdict(NodeProgress(seconds=seconds, ranks=tuple(mine))))
    of_nodes = [record_of_node(NodeProgress, one, node) for node, one in enumerate(gathered)]
    ranks = [progress for of_node in of_nodes for progress in of_node.ranks]
    where = [names[node] if len(names) > 1 else "" for node, of_node in enumerate(of_nodes) for _ in of_node.ranks]
    # all nodes report the same time: not each its own measurement
    slowest = max(of_node.seconds for of_node in of_nodes)
    return judged(ranks, outcome.ends, where, settings.timeout_seconds, backend, slowest)


def _run(settings: PreflightSettings, backend: str, files: Sequence[int], nodes: Nodes, entry: str) -> Outcome:
    job = PreflightJob(
        # unnamed files: nothing is left of them, however this process ends
        progress=tuple(f"/proc/{os.getpid()}/fd/{file}" for file in files),
        device=settings.device,
        num_devices=count_accelerators(settings.device),
        backend=backend,
        timeout_seconds=_PART_OF_LIMIT * settings.timeout_seconds,
    )
    return run_workers(
        Launch(
            entry=entry,
            job=job,
            nodes=nodes,
            threads=settings.threads or max(1, count_cores() // settings.num_ranks),
            # messages of libraries about a failure are in the exception too; half of them would hide the finding
            output_of=lambda rank: Output(log=os.devnull),
            store_prefix=f"preflight/{time.time_ns()}" if nodes.is_alone else "preflight",
            start=settings.start,
            most_seconds=settings.timeout_seconds,
        )
    )


def read_progress(file: int, rank: int) -> RankProgress:
    """Return the progress that a rank has written; an unfinished line does not count."""
    lines = os.pread(file, os.fstat(file).st_size, 0).decode().splitlines(keepends=True)
    at, seconds, wrong = None, {}, []
    for line in (parse_json(line) for line in lines if line.endswith("\n")):
        if "began" in line:
            at = line["began"]
        elif "done" in line:
            at, seconds[line["done"]] = None, line["seconds"]
        else:
            many = f"{line['num_wrong']} element(s), the first (number {line['element']})"
            wrong.append(f"{line['wrong']}: {many} is {line['got']:g} and must be {line['right']:g}")
    return RankProgress(rank=rank, done=tuple(seconds), at=at, wrong=tuple(wrong), seconds=seconds)


def judged(
    ranks: Sequence[RankProgress],
    ends: Sequence[WorkerEnd],
    where: Sequence[str],
    limit_seconds: float,
    backend: str,
    seconds: float,
) -> list[Finding]:
    """Return whether all succeeded with the right results, or which ranks did not.

    Args:
        ranks: Progress of each rank, by rank.
        ends: How each ended.
        where: Node of each rank, if there are several.
        limit_seconds: Time limit of the ranks.
        backend: Backend of their calls.
        seconds: Duration including their start and end.
    """
    wrong = [(progress.rank, operation) for progress in ranks for operation in progress.wrong]
    if wrong:
        rank, operation = wrong[0]
        more = f"; {len(wrong) - 1} more on {len({rank for rank, _ in wrong})} rank(s)" if len(wrong) > 1 else ""
        cure = (
            "train nothing with this: try another --backend and fewer ranks, look at the memory and the links of that "
            "host, and with NCCL set NCCL_P2P_DISABLE=1 to see whether a link between GPUs is bad"
        )
        seen = f"{_name(rank, where)} got a wrong result of {operation}{more}"
        return [failure(NAME, seen, "results must be right", cure)]
    if all(progress.is_through for progress in ranks) and all(end.exit_code == 0 for end in ends):
        large = max(progress.seconds["all_reduce of 4 MiB"] for progress in ranks)
        all_pairs = len(ranks) * (len(ranks) - 1) // 2
        summary = f"{len(ranks)} ranks over {backend}: sums right, {len(ranks)} broadcasts, {all_pairs} pair(s)"
        return [ok(NAME, f"{summary}; 4 MiB the first time in {1000 * large:.0f} ms, all in {format_seconds(seconds)}")]
    return [_blamed(ranks, {end.rank: end for end in ends}, where, limit_seconds, is_nccl=backend == "nccl")]


def _blamed(
    ranks: Sequence[RankProgress],
    ends: Mapping[int, WorkerEnd],
    where: Sequence[str],
    limit_seconds: float,
    *,
    is_nccl: bool,
) -> Finding:
    """Return a finding about the rank, or the two, because of which not all succeeded.

    Candidates in this order: a rank that failed for its own reason; one that was stopped when all were ended; one that
    was silent while others reported that they waited; the two between which the first call failed.
    """
    causes = [end for end in ends.values() if _is_cause(end) and not (is_nccl and _was_aborted(end))]
    if causes:
        first = min(causes, key=lambda end: end.time)
        at = ranks[first.rank].at
        at_what = at or ("leaving" if ranks[first.rank].is_through else "starting")
        seen = f"{_name(first.rank, where)} failed in {at_what}: {_reason(first, len(ranks))}"
        return failure(NAME, seen, "every rank must come through", _cure_of(at))
    late = [progress for progress in ranks if not progress.is_through]
    held = [progress for progress in late if _was_held(ends.get(progress.rank))]
    waiting = [
        progress
        for progress in late
        if _has_reported(end := ends.get(progress.rank)) or (is_nccl and end is not None and _was_aborted(end))
    ]
    if held:
        # ranks that waited may have had no time left to report it
        waiting = [progress for progress in late if progress not in held and len(progress.done) >= len(held[0].done)]
    silent = held or [progress for progress in late if progress not in waiting]
    if waiting and silent:
        behind = _behind(silent)
        others = [
            f"{_name(progress.rank, where)} waited for it in {progress.at}" for progress in waiting if progress.at
        ]
        seen = f"{_names(behind, where)} did not come through {_steps(behind)}; {'; '.join(others[:_MOST_NAMED])}"
        cure = _HELD_CURE if held else _SILENT_CURE
        return failure(NAME, seen, "every rank must answer", cure.format(_names(behind, where)))
    behind = _behind(waiting or late or list(ranks))
    at = behind[0].at
    pair = tuple(_name(progress.rank, where) for progress in behind) if len(behind) == 2 else ()
    seen = f"{_names(behind, where)} did not come through {_steps(behind)} within {limit_seconds:g} s"
    return failure(NAME, seen, "every rank must come through", _cure_of(at), pair)


_HELD_CURE = (
    "a process of {} is stopped (SIGSTOP, or a debugger): see on its host who does that to processes, and let it go on "
    "(`kill -CONT`)"
)
_SILENT_CURE = (
    "see on its host whether a process of {} is stopped or waits for its GPU or its disk (`ps -o pid,stat,wchan`, "
    "`nvidia-smi`), or give more time with --timeout"
)


def _is_cause(end: WorkerEnd) -> bool:
    if end.exit_code == 0 or end.was_stopped:
        return False
    return end.failure is None or not end.failure.is_consequence


def _was_held(end: WorkerEnd | None) -> bool:
    return end is not None and end.was_held


def _was_aborted(end: WorkerEnd) -> bool:
    """Return whether torch ended a rank because its NCCL call took too long: it does not raise, it aborts."""
    return end.exit_code == -signal.SIGABRT and end.failure is None and not end.was_stopped


def _has_reported(end: WorkerEnd | None) -> bool:
    return end is not None and end.failure is not None


def _reason(end: WorkerEnd, num_ranks: int) -> str:
    if end.failure is None:
        return in_brief(end, num_ranks).removeprefix(f"{end.name(num_ranks)} was ")
    message = end.failure.message.strip().partition("\n")[0]
    return message if end.failure.is_ours else worded(end.failure.type, message)


def _behind(ranks: Sequence[RankProgress]) -> list[RankProgress]:
    """Return the ranks with the least progress."""
    least = min(len(progress.done) for progress in ranks)
    return [progress for progress in ranks if len(progress.done) == least]


def _steps(ranks: Sequence[RankProgress]) -> str:
    return " and ".join(dict.fromkeys(progress.at or "starting" for progress in ranks))


def _name(rank: int, where: Sequence[str]) -> str:
    return f"rank {rank} on {where[rank]}" if where[rank] else f"rank {rank}"


def _names(ranks: Sequence[RankProgress], where: Sequence[str]) -> str:
    return few([_name(progress.rank, where) for progress in ranks], _MOST_NAMED)


def _cure_of(at: str | None) -> str:
    if at == "its device":
        return "see whether the GPU works (`nvidia-smi`), or leave it out with CUDA_VISIBLE_DEVICES"
    if at == "meeting the others":
        return (
            "see that nothing holds its connections up (a firewall, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME that name "
            "another interface), or give more time with --timeout"
        )
    return (
        "look at the network between them, with NCCL at what NCCL_DEBUG=INFO says (NCCL_P2P_DISABLE=1 or "
        "NCCL_IB_DISABLE=1 tells which way is bad), or give more time with --timeout"
    )
