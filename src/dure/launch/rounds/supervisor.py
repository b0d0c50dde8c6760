"""Rounds of a job: in each, all ranks of the present nodes start together and end together.

After each round the leader decides whether there is another one, and with which nodes. Every node decides by itself
only whether it still reaches the leader. A run on one host is that of a node without peers.
"""

import importlib
import socket
import time
from contextlib import ExitStack, closing
from dataclasses import replace

from dure.failures.verdict import WorkerEnd, stop_signal
from dure.launch.hangs.diagnosis import HangVerdict
from dure.launch.nodes.failover import NOBODY
from dure.launch.nodes.member import Member
from dure.launch.nodes.messages import Ready
from dure.launch.rounds.outcome import Outcome
from dure.launch.rounds.request import Launch, StoreSocket
from dure.launch.rounds.restart_policy import Restarts
from dure.launch.rounds.round import (
    decide_to_fork,
    ending_of,
    hang_survey,
    kill_all,
    listening_on,
    report_hang,
    run_round,
    show_pending_output,
)
from dure.launch.rounds.signal_forwarding import StoppedBeforeStart, passing_signals_on
from dure.launch.rounds.stop_limit import has_left_snapshots, save_seconds
from dure.launch.rounds.surviving_memory import SurvivingMemory
from dure.launch.worker.worker_process import Worker
from dure.process.round_orders import RoundPlan
from dure.process.stop_signals import signals_held_back

_PREPARATION_SECONDS = 600.0
"""Seconds that all nodes of a first round have to import what their ranks need."""
_LAST_MESSAGE_SECONDS = 30.0
"""Seconds that a node waits for the leader's last message, after a stop request between two rounds."""


def run_workers(launch: Launch, until: ExitStack | None = None) -> Outcome:
    """Run this host's part of a job, round by round, leave no process behind, and return how all ranks ended.

    After the first rank failed, the others have a second to end by themselves; then they are killed, unless they can
    continue without it. Then all are restarted in a new round, as often as `launch.restarts` allows. The first stop
    signal is forwarded to all ranks, which checkpoint and end; a second one kills them.

    Args:
        launch: Description of the start.
        until: Stack that closes when the end is on record; signals that come too late for the ranks wait for it.

    Raises:
        EnvironmentLacks: Fork was requested where it cannot work, or the system cannot start another process.
    """
    by_fork, nodes = decide_to_fork(launch), launch.nodes
    workers = list[Worker]()
    with passing_signals_on(workers, until) as signals, closing(SurvivingMemory(launch)) as memory:
        received = signals.received
        rounds = _Rounds(launch, memory, workers, received, by_fork=by_fork)
        try:
            signals.interrupt_from_here()
            if by_fork:
                # once, before any rank exists: a second and a half of imports that every rank would need
                importlib.import_module(launch.entry).before_fork(launch.job)
            rounds.run()
        except StoppedBeforeStart:
            nodes.exchange_signals(received)
        finally:
            signals.interrupts = False
            kill_all(launch, workers)
            rounds.close_store()
            show_pending_output(launch, workers)
        rounds.leave()
        return Outcome(
            ends=nodes.news.ends,
            signal=received[0] if received else None,
            refusal=None if nodes.over is None else nodes.over.refusal,
            hang=rounds.hang,
            lost=nodes.why_lost,
            is_cut_off=nodes.has_lost_leader or nodes.leader == NOBODY,
        )


class _Rounds:
    """Rounds of one host."""

    def __init__(
        self, launch: Launch, memory: SurvivingMemory, workers: list[Worker], received: list[int], *, by_fork: bool
    ) -> None:
        self.launch, self.nodes, self.memory = launch, launch.nodes, memory
        self.workers, self.received, self.by_fork = workers, received, by_fork
        """Ended workers of a round stay in the list until the next one begins."""
        self.last = launch
        """Launch of the last round."""
        self.hang: HangVerdict | None = None
        self.restarts = Restarts(launch.restarts)
        self.plan = RoundPlan()
        """Plan of the next round; on other nodes than the leader, the part of it that would apply if they led."""
        self.expected = {member.node_rank for member in self.nodes.members}
        """Node ranks for which the next round waits."""
        self.deadline = time.monotonic() + _PREPARATION_SECONDS
        """Monotonic time until which it waits for them."""
        self.absent_deadline = 0.0
        """Monotonic time until which it also waits for those that cannot be reached."""
        self.is_saving = False
        """True if a stop signal has arrived, so that the next round only saves the ranks' snapshots."""
        self.is_waiting = False
        """True if it has been reported that too few nodes are present."""
        self._listener: socket.socket | None = None
        """Socket of the next or the current round's store, on the leader."""

    def run(self) -> None:
        """Run rounds until there are no more."""
        nodes = self.nodes
        nodes.is_under_way = True
        if nodes.reception is not None and self.launch.failover is not None:
            nodes.reception.folder = self.launch.failover.folder  # from now on nodes may join
        if not nodes.is_leader:
            nodes.send_to_first(Ready())
        while (ready := self._next()) is not None:
            plan, store = ready
            try:
                self.last = self._placed(plan)
                self.hang = run_round(
                    self.last, self.workers, self.memory, nodes.round, self.received, store, by_fork=self.by_fork
                )
            finally:
                self.close_store()
            self.is_saving = False
            self._finish()
            self.plan = self.plan.after_round(has_begun=nodes.news.has_begun)
            if nodes.is_leader and not self._goes_on():
                return

    # --- start of a round

    def _next(self) -> tuple[RoundPlan, StoreSocket] | None:
        """Wait for the next round; None when there is none."""
        nodes = self.nodes
        survey = hang_survey(self.launch, [], self.memory)
        while True:
            nodes.exchange_signals(self.received)
            self._apply_stop()
            if self._is_at_end():
                return None
            if nodes.has_lost_leader or (nodes.lease is not None and nodes.lease.is_deposed):
                self.workers.clear()  # others have continued: these ends mean nothing now, and a signal ends this wait
                if not self._find_leader():
                    return None
                continue
            if nodes.is_leader and (members := self._enough()) is not None:
                return self._open(members)
            if nodes.next_round is not None:
                begun = nodes.enter_round()
                return begun.plan, StoreSocket(host=self._store_host(), port=begun.port, listener=None)
            nodes.sleep(0.2)
            nodes.pump()
            if survey is not None and (found := survey.advance()) is not None:
                report_hang(self.launch, [], found[0])

    def _apply_stop(self) -> None:
        """Restrict the next round to saving snapshots if a stop signal has arrived."""
        if self.received and not self.is_saving and self._can_save():
            self.is_saving = True
            self.plan = self.plan.stopped_by(self.received[0])
            self.deadline = time.monotonic() + save_seconds(self.last)
            self.nodes.exchange_signals(self.received)  # otherwise other nodes would take it for a signal to that round

    def _is_at_end(self) -> bool:
        """Return whether there is no further round."""
        nodes = self.nodes
        is_stopped = self.received and not (self.is_saving and len(self.received) == 1)
        return bool(nodes.is_over or nodes.lost or nodes.refusal is not None or is_stopped)

    def _can_save(self) -> bool:
        """Return whether the ranks of all nodes have ended without a checkpoint, and have left snapshots to save.

        If another node leads, as far as known here: the leader decides, and the others wait for its message.
        """
        nodes, news = self.nodes, self.nodes.news
        if not nodes.is_leader:
            has_begun = any(step > 0 for step in self._own_steps().values())
            return has_left_snapshots(self.last, self._own_ends(), self.received, has_begun=has_begun)
        is_whole = len(news.ends) == nodes.world_size and len(news.with_snapshots) == len(nodes.members)
        return (
            is_whole
            and news.interrupted_because is None
            and has_left_snapshots(self.last, news.ends, self.received, has_begun=news.has_begun)
        )

    def _enough(self) -> list[Member] | None:
        """Return the nodes of the next round once they are present and ready, on the leader."""
        nodes = self.nodes
        known = {member.node_rank: member for member in nodes.members}
        if nodes.reception is not None and not self.is_saving:  # joining nodes have nothing to save
            known |= nodes.reception.waiting
        there = {rank for rank in known if nodes.is_known(rank)}
        ready = {rank for rank in there if rank == nodes.me.node_rank or rank in nodes.ready}
        now, failover = time.monotonic(), self.launch.failover
        wanted = self.expected if now < self.absent_deadline else self.expected & there
        if len(ready) >= nodes.fewest and wanted <= ready:
            self.is_waiting = False
            return [known[rank] for rank in ready]
        if len(there) < nodes.fewest and now > self.absent_deadline and not self.is_waiting and failover is not None:
            self.is_waiting = True
            failover.on_wait(
                f"{len(there)} of the {nodes.fewest} nodes that the run needs are there: it waits for more"
            )
        if now > self.deadline:
            nodes.lost = nodes.lost or (
                f"{len(ready)} of the {nodes.fewest} nodes that the run needs are there and ready, and the others did "
                "not come within --rendezvous-timeout"
            )
        return None

    def _open(self, members: list[Member]) -> tuple[RoundPlan, StoreSocket] | None:
        """Begin a round with these nodes, on the leader."""
        nodes = self.nodes
        nodes.take_in(members)
        if nodes.reception is not None:
            for member in members:
                nodes.reception.waiting.pop(member.node_rank, None)
        if nodes.lease is not None and nodes.lease.is_taken():
            nodes.lease.is_deposed = True
            return self._next()
        if nodes.is_outdated:
            self.memory.forget()
        host = self._store_host()
        with signals_held_back():  # after a signal the socket must be in the attribute, to be closed
            # the store is served on this same socket: no other process can take its port
            listener = self._listener = listening_on(host)
        port = int(listener.getsockname()[1])
        nodes.open_round(port, self.plan)
        return self.plan, StoreSocket(host=host, port=port, listener=listener)

    def close_store(self) -> None:
        """Close the socket on which the store is served; a process that serves it has its own copy."""
        if self._listener is not None:
            self._listener.close()

    def _store_host(self) -> str:
        nodes = self.nodes
        return "127.0.0.1" if len(nodes.members) == 1 else nodes.member(nodes.leader).address

    def _placed(self, plan: RoundPlan) -> Launch:
        """Return the launch of this round on this host, after printing the reason for the round."""
        listener, is_leader = self.launch.listener, self.nodes.is_leader
        if not is_leader:
            self.plan = plan  # this node may lead later
        if plan.restart is not None and not is_leader:
            self.restarts.count_restart(plan.restart)
        if plan.restart is not None and listener is not None:
            listener.restart(plan.restart)
        if plan.change is not None and listener is not None:
            listener.change(plan.change)
        return replace(self.launch, orders=plan.orders)

    # --- end of a round

    def _finish(self) -> None:
        """Report to all nodes how the ranks here ended."""
        nodes, workers = self.nodes, self.workers
        show_pending_output(self.last, workers)
        ends = [end if nodes.is_alone else replace(end, node=str(nodes.me)) for end in self._own_ends()]
        if not self.received and ending_of(ends) == "stopped" and (number := stop_signal(ends)) is not None:
            nodes.send_signal(number)
        nodes.send_ending(ending_of(ends) or "ended")
        survey = hang_survey(self.last, workers, self.memory)

        def tick() -> bool:
            if survey is not None and (found := survey.advance()) is not None:
                report_hang(self.last, workers, found[0])
            nodes.exchange_signals(self.received)
            return len(self.received) < 2

        nodes.finish_round(ends, self._own_steps(), tick, has_snapshots=self.memory.has_snapshots())

    def _own_ends(self) -> list[WorkerEnd]:
        return [worker.end for worker in self.workers if worker.end is not None]

    def _own_steps(self) -> dict[int, int]:
        return {worker.rank: self.memory.heartbeats.last(worker.rank).step for worker in self.workers}

    def _goes_on(self) -> bool:
        """Decide, on the leader, whether there is another round after the last one."""
        nodes, hangs, news = self.nodes, self.launch.hangs, self.nodes.news
        if news.ends and all(end.exit_code == 0 for end in news.ends):
            return False
        self.expected = {member.node_rank for member in nodes.members if nodes.is_known(member.node_rank)}
        timeout = _PREPARATION_SECONDS if self.launch.failover is None else self.launch.failover.timeout_seconds
        self.deadline = time.monotonic() + timeout
        self._apply_stop()
        if self._is_at_end():
            return False
        if self.is_saving:
            return True
        if self.hang is not None and hangs is not None and hangs.action == "stop":
            return False
        if news.interrupted_because is not None or (nodes.lease is not None and nodes.lease.is_deposed):
            self.plan = self.plan.after_change(news.interrupted_because)
            return True
        if self.hang is not None:
            restart = self.restarts.after_hang(self.hang)
        else:
            restart = self.restarts.after(news.ends, lambda rank: news.steps.get(rank, -1))
        if restart is None:
            return False
        self.plan = self.plan.after_restart(restart)
        return True

    def _find_leader(self) -> bool:
        """Find the current leader; the ranks here have ended. False if the run does not continue here."""
        failover, nodes = self.launch.failover, self.nodes
        reason = nodes.news.interrupted_because
        if failover is None:
            nodes.lost = reason or "the leader of the run is gone"
            return False
        found = failover.go(nodes, lambda: bool(self.received))
        if found is None:
            return False
        if not found.keeps_memory:
            self.memory.forget()
        if nodes.is_leader:
            self.plan = self.plan.after_change(reason)
            self.expected = found.expected
            self.deadline = time.monotonic() + failover.timeout_seconds
            self.absent_deadline = time.monotonic() + found.patience_seconds
        else:
            nodes.send_to_first(Ready())
        return True

    def leave(self) -> None:
        """Announce the end to the others, or wait for the leader's announcement."""
        nodes = self.nodes
        if nodes.is_leader:
            if not nodes.is_over:
                nodes.send_outcome(self.restarts.refusal)
            return
        deadline = time.monotonic() + _LAST_MESSAGE_SECONDS
        while not (nodes.is_over or nodes.lost or nodes.refusal is not None or nodes.has_lost_leader):
            if time.monotonic() > deadline or len(self.received) > 1:
                return
            nodes.sleep(0.1)
            nodes.pump()
            nodes.exchange_signals(self.received)
