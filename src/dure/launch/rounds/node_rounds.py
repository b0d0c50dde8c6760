"""The rounds of a job on several hosts: all ranks of the nodes that are there start together, end together, and so on.

The leader decides after each round whether there is another one, and of which nodes. Every node decides for itself only
whether it still knows the leader.
"""

import importlib
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from dure.failures.verdict import WorkerEnd, stop_signal
from dure.launch.hangs.diagnosis import HangVerdict
from dure.launch.nodes.failover import NOBODY
from dure.launch.nodes.peers import Member, Nodes, StoppedByPeer
from dure.launch.rounds.kept_memory import KeptMemory
from dure.launch.rounds.request import Launch, StoreSocket
from dure.launch.rounds.restart_policy import Restart, Restarts
from dure.launch.rounds.round import (
    Outcome,
    decide_to_fork,
    ending_of,
    joint_look,
    kill_all,
    listening_on,
    report_hang,
    run_round,
    show_what_was_said,
)
from dure.launch.rounds.signal_forwarding import StoppedBeforeStart, passing_signals_on
from dure.launch.rounds.stop_limit import has_left_snapshots, save_seconds, saving
from dure.launch.worker.worker_process import Worker

_PREPARATION_SECONDS = 600.0
"""Seconds in which all nodes of a first round must have imported what their ranks need."""
_KEPT = ("microbatch_size", "trusted_samples")
"""Keys of the orders to ranks that hold for every following round."""
_LAST_WORD_SECONDS = 30.0
"""Seconds that a node that was asked to stop between two rounds waits for the leader's last message."""


def run_on_nodes(launch: Launch, nodes: Nodes) -> Outcome:
    """Run this host's part of a job, round by round, and return how all ranks of all hosts ended.

    Raises:
        EnvironmentLacks: A fork was asked for where it cannot work, or the system starts no more processes.
    """
    by_fork = decide_to_fork(launch)
    memory, workers = KeptMemory(launch), list[Worker]()
    with closing(memory), passing_signals_on(workers) as received:
        rounds = _Rounds(launch, nodes, memory, workers, received, by_fork=by_fork)
        try:
            if by_fork:
                importlib.import_module(launch.entry).before_fork(launch.job)
            rounds.run()
        except StoppedBeforeStart:
            nodes.exchange_signals(received)
        except StoppedByPeer as stop:
            received.append(stop.number)
        finally:
            kill_all(workers)
            show_what_was_said(launch, workers)
        rounds.part()
        return Outcome(
            ends=nodes.news.ends,
            signal=received[0] if received else None,
            refusal=nodes.ending.get("refusal"),
            hang=rounds.hang,
            lost=nodes.why_lost,
            is_cut_off=nodes.has_lost_leader or nodes.leader == NOBODY,
        )


class _Rounds:
    """The rounds of one host."""

    def __init__(
        self,
        launch: Launch,
        nodes: Nodes,
        memory: KeptMemory,
        workers: list[Worker],
        received: list[int],
        *,
        by_fork: bool,
    ) -> None:
        self.launch, self.nodes, self.memory = launch, nodes, memory
        self.workers, self.received, self.by_fork = workers, received, by_fork
        self.hang: HangVerdict | None = None
        self.restarts = Restarts(launch.restarts)
        self.told: dict[str, Any] = {}
        """Orders to the ranks of the next round, and the reason for it; on the leader."""
        self.expected = {member.node_rank for member in nodes.members}
        """Node ranks for which the next round waits."""
        self.patience = time.monotonic() + _PREPARATION_SECONDS
        """Monotonic time until which it waits."""
        self.hope = 0.0
        """Monotonic time until which it also waits for nodes that cannot be reached."""
        self.is_saving = False
        """True if a stop signal has come, so that the next round only saves what the ranks have left in memory."""
        self.is_waiting = False
        """True if it has been reported that too few nodes are there."""

    def run(self) -> None:
        """Run rounds until there is no more."""
        nodes = self.nodes
        nodes.is_under_way = True
        if nodes.reception is not None and self.launch.way_back is not None:
            nodes.reception.folder = self.launch.way_back.folder  # from here on nodes may come
        if not nodes.is_leader:
            nodes.send_to_first({"kind": "ready"})
        while (ready := self._next()) is not None:
            told, store = ready
            try:
                launch = self._placed(told)
                self.hang = run_round(
                    launch, self.workers, self.memory, nodes.round, self.received, store, by_fork=self.by_fork
                )
            finally:
                if store.listener is not None:
                    store.listener.close()
            self._finish(launch)
            if nodes.is_leader and not self._goes_on(launch):
                return
            if not nodes.is_leader:
                self.is_saving = has_left_snapshots(launch, self._own_ends(), self.received)
            if nodes.is_over or (self.received and not self.is_saving):
                return
            self.workers.clear()

    # --- the beginning of a round

    def _next(self) -> tuple[Mapping[str, Any], StoreSocket] | None:
        """Wait for the next round; None when there is none."""
        nodes = self.nodes
        look = joint_look(self.launch, self.workers, self.memory)
        while not self._is_at_end():
            if nodes.has_lost_leader or (nodes.lease is not None and nodes.lease.is_deposed):
                if not self._find_leader():
                    return None
                continue
            if nodes.is_leader and (members := self._enough()) is not None:
                return self._open(members)
            if nodes.next_round is not None:
                told = nodes.enter_round()
                return told, StoreSocket(host=self._store_host(), port=int(told["port"]), listener=None)
            nodes.sleep(0.2)
            nodes.pump()
            if look is not None and (found := look.advance()) is not None:
                report_hang(self.launch, self.workers, found[0])
            nodes.exchange_signals(self.received)
        return None

    def _is_at_end(self) -> bool:
        nodes = self.nodes
        is_stopped = self.received and not self.is_saving
        return bool(nodes.is_over or nodes.lost or nodes.refusal is not None or is_stopped)

    def _enough(self) -> list[Member] | None:
        """Return the nodes of the next round once they are there and ready, on the leader."""
        nodes = self.nodes
        known = {member.node_rank: member for member in nodes.members}
        if nodes.reception is not None and not self.is_saving:  # who comes has nothing to save
            known |= nodes.reception.waiting
        there = {rank for rank in known if nodes.is_known(rank)}
        ready = {rank for rank in there if rank == nodes.me.node_rank or rank in nodes.ready}
        now, way_back = time.monotonic(), self.launch.way_back
        wanted = self.expected if now < self.hope else self.expected & there
        if len(ready) >= nodes.fewest and wanted <= ready:
            self.is_waiting = False
            return [known[rank] for rank in ready]
        if len(there) < nodes.fewest and now > self.hope and not self.is_waiting and way_back is not None:
            self.is_waiting = True
            way_back.on_wait(
                f"{len(there)} of the {nodes.fewest} nodes that the run needs are there: it waits for more"
            )
        if now > self.patience:
            nodes.lost = nodes.lost or (
                f"{len(ready)} of the {nodes.fewest} nodes that the run needs are there and ready, and the others did "
                "not come within --rendezvous-timeout"
            )
        return None

    def _open(self, members: list[Member]) -> tuple[Mapping[str, Any], StoreSocket] | None:
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
        listener = listening_on(host)
        told = {"microbatch_size": None, "trusted_samples": None, **self.told}
        port = int(listener.getsockname()[1])
        nodes.open_round(port, told)
        return told, StoreSocket(host=host, port=port, listener=listener)

    def _store_host(self) -> str:
        nodes = self.nodes
        return "127.0.0.1" if len(nodes.members) == 1 else nodes.member(nodes.leader).address

    def _placed(self, told: Mapping[str, Any]) -> Launch:
        """Return what is started here in this round, after people were told why there is one."""
        launch, nodes = self.launch, self.nodes
        if not nodes.is_leader:
            self.told = {key: told.get(key) for key in _KEPT}  # this node may lead later
        if told.get("restart") is not None:
            restart = _restart_from_json(told["restart"])
            if not nodes.is_leader:
                self.restarts.heed(restart)
            if launch.on_restart is not None:
                launch.on_restart(restart)
        if told.get("change") is not None and launch.on_change is not None:
            launch.on_change(str(told["change"]))
        launch = replace(
            launch, microbatch_size=told.get("microbatch_size"), trusted_samples=told.get("trusted_samples")
        )
        if told.get("stopped_by") is not None:
            launch = saving(launch, int(told["stopped_by"]))
        if launch.output_of is None:
            return launch
        ranks = range(nodes.first_rank, nodes.first_rank + launch.num_processes)
        return replace(launch, outputs=[launch.output_of(rank) for rank in ranks])

    # --- its end

    def _finish(self, launch: Launch) -> None:
        """Let all nodes know how the ranks here ended."""
        nodes, workers = self.nodes, self.workers
        show_what_was_said(launch, workers)
        ends = [replace(end, node=str(nodes.me)) for end in self._own_ends()]
        steps = {worker.rank: self.memory.heartbeats.last(worker.rank).step for worker in workers}
        if not self.received and ending_of(ends) == "stopped" and (number := stop_signal(ends)) is not None:
            nodes.tell_signal(number)
        nodes.tell_ending(ending_of(ends) or "ended")
        look = joint_look(launch, workers, self.memory)

        def tick() -> bool:
            if look is not None and (found := look.advance()) is not None:
                report_hang(launch, workers, found[0])
            nodes.exchange_signals(self.received)
            return len(self.received) < 2

        nodes.finish_round(ends, steps, tick)

    def _own_ends(self) -> list[WorkerEnd]:
        return [worker.end for worker in self.workers if worker.end is not None]

    def _goes_on(self, launch: Launch) -> bool:
        """Decide, on the leader, whether there is another round after the one that was started so."""
        nodes, hangs, ends = self.nodes, self.launch.hangs, self.nodes.news.ends
        self.is_saving = self._are_all_ended_with_snapshots(launch)
        if self._is_at_end() or (ends and all(end.exit_code == 0 for end in ends)):
            return False
        if self.hang is not None and hangs is not None and hangs.action == "stop":
            return False
        known = {key: self.told.get(key) for key in _KEPT}
        self.expected = {member.node_rank for member in nodes.members if nodes.is_known(member.node_rank)}
        timeout = _PREPARATION_SECONDS if self.launch.way_back is None else self.launch.way_back.timeout_seconds
        self.patience = time.monotonic() + (save_seconds(launch) if self.is_saving else timeout)
        if self.is_saving:
            self.told = {**known, "stopped_by": self.received[0]}
            return True
        if nodes.news.shaken is not None or (nodes.lease is not None and nodes.lease.is_deposed):
            self.told = {**known, "change": nodes.news.shaken}
            return True
        steps = nodes.news.steps
        if self.hang is not None:
            restart = self.restarts.after_hang(self.hang)
        else:
            restart = self.restarts.after(ends, lambda rank: steps.get(rank, -1))
        if restart is None:
            return False
        if restart.microbatch_sizes is not None:
            known["microbatch_size"] = restart.microbatch_sizes[1]
        if restart.go_back_to is not None:
            known["trusted_samples"] = restart.go_back_to
        elif any(step > 0 for step in steps.values()):
            known["trusted_samples"] = None
        self.told = {**known, "restart": asdict(restart)}
        return True

    def _are_all_ended_with_snapshots(self, launch: Launch) -> bool:
        """Return whether the ranks of all nodes were ended after a stop signal, each with a snapshot left to save."""
        news, world_size = self.nodes.news, self.nodes.world_size
        is_whole = len(news.ends) == world_size and sum(step > 0 for step in news.steps.values()) == world_size
        return is_whole and news.shaken is None and has_left_snapshots(launch, news.ends, self.received)

    def _find_leader(self) -> bool:
        """Find out who leads now; the ranks here have ended. False when the run does not go on here."""
        way_back, nodes = self.launch.way_back, self.nodes
        said = nodes.news.shaken
        if way_back is None:
            nodes.lost = said or "the leader of the run is gone"
            return False
        found = way_back.go(nodes, lambda: bool(self.received))
        if found is None:
            return False
        if not found.keeps_memory:
            self.memory.forget()
        if nodes.is_leader:
            self.told = {**{key: self.told.get(key) for key in _KEPT}, "change": said}
            self.expected = found.expected
            self.patience = time.monotonic() + way_back.timeout_seconds
            self.hope = time.monotonic() + found.patience_seconds
        else:
            nodes.send_to_first({"kind": "ready"})
        return True

    def part(self) -> None:
        """Tell the others that this is the end, or wait for the leader to say so."""
        nodes = self.nodes
        if nodes.is_leader:
            if not nodes.is_over:
                nodes.tell_outcome(refusal=self.restarts.refusal)
            return
        deadline = time.monotonic() + _LAST_WORD_SECONDS
        while not (nodes.is_over or nodes.lost or nodes.refusal is not None or nodes.has_lost_leader):
            if time.monotonic() > deadline or len(self.received) > 1:
                return
            nodes.sleep(0.1)
            nodes.pump()
            nodes.exchange_signals(self.received)


def _restart_from_json(told: Mapping[str, Any]) -> Restart:
    sizes = told["microbatch_sizes"]
    return Restart(**{**told, "microbatch_sizes": None if sizes is None else (int(sizes[0]), int(sizes[1]))})
