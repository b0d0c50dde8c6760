"""Starts the ranks of one host, watches them, and ends them together."""

import importlib
import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from dure.launch.hangs.diagnosis import HangVerdict
from dure.launch.rounds.kept_memory import KeptMemory
from dure.launch.rounds.node_rounds import run_on_nodes
from dure.launch.rounds.request import Launch, StoreSocket
from dure.launch.rounds.restart_policy import Restart, Restarts
from dure.launch.rounds.round import Outcome, decide_to_fork, kill_all, listening_on, run_round, show_what_was_said
from dure.launch.rounds.signal_forwarding import StoppedBeforeStart, passing_signals_on
from dure.launch.rounds.stop_limit import has_left_snapshots, saving
from dure.launch.worker.worker_process import Worker

__all__ = ["Outcome", "as_decided", "run_workers"]


def run_workers(launch: Launch) -> Outcome:
    """Start all ranks, wait for all of them, and leave none behind.

    The first rank that fails gives the others a second to end by themselves; then they are killed, unless it is one
    that they can do without. Then all are started again in a new round, as often as `launch.restarts` allows. The
    first stop signal is passed on to all ranks, which checkpoint and end; a second
    one kills them.

    Raises:
        EnvironmentLacks: A fork was asked for where it cannot work, or the system starts no more processes.
    """
    if launch.nodes is not None:
        return run_on_nodes(launch, launch.nodes)
    by_fork = decide_to_fork(launch)
    workers: list[Worker] = []
    restarts = Restarts(launch.restarts)
    memory = KeptMemory(launch)
    hang: HangVerdict | None = None
    with closing(memory), passing_signals_on(workers) as received:
        try:
            if by_fork:
                # once, before any rank exists: a second and a half of imports that every rank would pay
                importlib.import_module(launch.entry).before_fork(launch.job)
            for round_number in itertools.count():
                with _loopback_store() as store:
                    hang = run_round(launch, workers, memory, round_number, received, store, by_fork=by_fork)
                ends = [worker.end for worker in workers if worker.end is not None]
                has_begun = memory.has_begun(launch.num_processes)
                if memory.has_snapshots() and has_left_snapshots(launch, ends, received, has_begun=has_begun):
                    workers.clear()
                    launch = saving(launch, received[0])
                    continue
                if received or (hang is not None and launch.hangs is not None and launch.hangs.action == "stop"):
                    restart = None
                elif hang is not None:
                    restart = restarts.after_hang(hang)
                else:
                    restart = restarts.after(ends, lambda rank: memory.heartbeats.last(rank).step)
                if restart is None:
                    break
                show_what_was_said(launch, workers)
                if launch.on_restart is not None:
                    launch.on_restart(restart)
                launch = as_decided(launch, restart, memory)
                if received:  # while no rank ran: what those before left in memory is saved all the same
                    if not (memory.has_snapshots() and has_left_snapshots(launch, ends, received)):
                        break
                    launch = saving(launch, received[0])
                workers.clear()
        except StoppedBeforeStart:
            pass
        finally:
            kill_all(workers)
            show_what_was_said(launch, workers)
        return Outcome(
            ends=[worker.end for worker in workers if worker.end is not None],
            signal=received[0] if received else None,
            refusal=restarts.refusal,
            hang=hang,
        )


def as_decided(launch: Launch, restart: Restart, memory: KeptMemory) -> Launch:
    """Return what the next round is to be told."""
    if restart.microbatch_sizes is not None:
        launch = replace(launch, microbatch_size=restart.microbatch_sizes[1])
    if restart.go_back_to is not None:
        return replace(launch, trusted_samples=restart.go_back_to)
    # a rank that has begun a step knows that all have forgotten what was not to be trusted
    return replace(launch, trusted_samples=None) if memory.has_begun(launch.num_processes) else launch


@contextmanager
def _loopback_store() -> Iterator[StoreSocket]:
    """Bind a free port; the store is served on this very socket, so no other process can take it."""
    with listening_on("127.0.0.1") as listener:
        yield StoreSocket(host="127.0.0.1", port=int(listener.getsockname()[1]), listener=listener)
