"""One round of a job on one host: its ranks are started, watched, and ended together."""

import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext

from dure.errors import EnvironmentLacks
from dure.failures.verdict import STOP_ENDS, WorkerEnd, may_follow_another, stop_signal
from dure.launch.hangs.call_counts import CallCounts
from dure.launch.hangs.diagnosis import HangVerdict, explain, line_of
from dure.launch.hangs.probe import ask_how_they_end, examine
from dure.launch.hangs.rank_state import RankState
from dure.launch.hangs.watchdog import LEAST_SECONDS, UNKNOWN_SECONDS, HangPolicy, Watchdog
from dure.launch.rounds.node_hang_survey import HangSurvey
from dure.launch.rounds.request import Launch, StoreSocket
from dure.launch.rounds.signal_forwarding import pass_on_signal
from dure.launch.rounds.start_rank import check_open_files, start_worker
from dure.launch.rounds.stop_limit import StopLimit
from dure.launch.rounds.surviving_memory import SurvivingMemory
from dure.launch.worker.fork_safety import reason_fork_would_fail, reason_not_to_fork
from dure.launch.worker.leftovers import end_leftovers
from dure.launch.worker.stacks import why_alive
from dure.launch.worker.store_server import StoreServer
from dure.launch.worker.worker_process import Worker
from dure.process.stop_signals import signals_held_back
from dure.terminal import end_open_line, few

_FAILURE_GRACE_SECONDS = 1.0
"""Seconds that the other ranks have, after one failed, to end by themselves and to report the reason."""
_RESTART_GRACE_SECONDS = 0.1
"""Seconds that they have if all will be restarted anyway and the first to fail has reported the reason."""
_POLL_SECONDS = 0.02
_COUNTS_OF_A_LIMIT = 0.25
"""Interval between requests for the ranks' call counts, as a fraction of the limit."""
_LOOK_SECONDS = 0.5
"""Maximum sleep in seconds, which bounds the cost of a missed wake-up."""
_LATE_SECONDS = 1.0
"""Seconds by which a sleep is too long if this process and its ranks were stopped, by Ctrl-Z or with the whole host;
such time counts for no limit. A busy host delays it by less.
"""
_KILL_NOTICE_SECONDS = 5.0
"""Seconds after which a killed rank that is still there is reported."""
_STOP_LOOK_SECONDS = 0.1
"""Maximum sleep in seconds after a stop signal."""


def run_round(
    launch: Launch,
    workers: list[Worker],
    memory: SurvivingMemory,
    round_number: int,
    received: list[int],
    store: StoreSocket,
    *,
    by_fork: bool,
) -> HangVerdict | None:
    """Start all ranks once, and return when all have ended; the verdict if they were ended because they hung."""
    memory.heartbeats.forget()
    check_open_files(len(launch.nodes.own_ranks))
    outputs = {rank: launch.output_of(rank) for rank in launch.nodes.own_ranks}
    with ExitStack() as store_server:
        with signals_held_back():  # until every process is known: no worker may miss a forwarded signal
            workers.clear()
            store_server.enter_context(_store_served(launch, store, by_fork=by_fork))
            for rank, output in outputs.items():
                worker = start_worker(launch, rank, output, store, memory, round_number=round_number, by_fork=by_fork)
                workers.append(worker)  # one by one: those started must be known if the next one fails to start
            _pass_on_earlier_signals(launch, workers, received)
        if store.listener is not None:
            store.listener.close()
        hang = _wait(launch, workers, memory, received)
        if _is_cause_worth_waiting_for(launch) and not received:
            _look_for_the_cause(workers, memory)
        kill_all(launch, workers)
    if received or any(worker.end is not None and worker.end.exit_code != 0 for worker in workers):
        # processes left by a script that ended normally are its own concern
        end_leftovers({worker.mark for worker in workers}, min(worker.started_at for worker in workers))
    return hang


def _is_cause_worth_waiting_for(launch: Launch) -> bool:
    """Return whether ranks may take long from an error to its report: scripts may clean up, a task's ranks do not.

    Without restarts nothing is lost by waiting.
    """
    return launch.restarts.after_any or not launch.restarts.most


def _look_for_the_cause(workers: list[Worker], memory: SurvivingMemory) -> None:
    """Note where the last ranks are if the others have only lost them: they may be cleaning up after an error."""
    ends = [worker.end for worker in workers if worker.end is not None]
    if len(ends) == len(workers) or not may_follow_another(ends):
        return
    ask_how_they_end(workers)
    for worker, state in zip(workers, examine(workers, memory.heartbeats), strict=True):
        worker.last_line = line_of(state)


def _pass_on_earlier_signals(launch: Launch, workers: list[Worker], received: list[int]) -> None:
    """Forward a stop signal that arrived while no rank ran, unless it was the reason to start these."""
    if len(received) > (launch.orders.stopped_by is not None):
        for worker in workers:
            worker.send(received[0])
    if len(received) > 1:
        kill_all(launch, workers)


def show_pending_output(launch: Launch, workers: list[Worker]) -> None:
    """Have all output of ranks shown, so that the next message is below it, on its own line."""
    if launch.logs is not None:
        launch.logs.catch_up()
    elif any(worker.rank == 0 and (worker.end is None or worker.end.exit_code < 0) for worker in workers):
        end_open_line()


def report_hang(launch: Launch, workers: list[Worker], verdict: HangVerdict) -> None:
    """Report ranks that hang, if the launch has a listener."""
    if launch.listener is not None:
        show_pending_output(launch, workers)
        launch.listener.hang(verdict)


def _wait(launch: Launch, workers: list[Worker], memory: SurvivingMemory, received: list[int]) -> HangVerdict | None:
    """Wait until all ranks have ended; once one has, for its grace time only, and never beyond the time limit.

    Returns:
        The verdict if they hang and are not waited for; otherwise None.
    """
    watchdog = None if launch.hangs is None else Watchdog(memory.heartbeats, launch.hangs.hang_after)
    counts = call_counts(launch, watchdog)
    survey = hang_survey(launch, workers, memory, watchdog, received)
    deadline = None if launch.most_seconds is None else time.monotonic() + launch.most_seconds
    stop = StopLimit(launch, memory.heartbeats)
    have_been_asked = False
    while True:
        alive = _still_alive(workers)
        if not alive:
            return None
        ends = [worker.end for worker in workers if worker.end is not None]
        ending = ending_of(ends)
        grace = _grace(ending, launch, ends)
        if ending == "stopped" and not received and not have_been_asked:
            have_been_asked = True
            _ask_the_others_too(launch, alive, ends)
        others: list[int] = [] if launch.logs is None else launch.logs.waiting_for
        _fall_silent(launch, alive)
        grace = _least(grace, _exchange_events(launch, workers, received, ending))
        others += launch.nodes.descriptors
        if received:
            grace = _least(grace, _time_to_stop(launch, stop, workers, memory, survey))
        if grace is not None:
            deadline = min(deadline or float("inf"), time.monotonic() + grace)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return None
        most = _STOP_LOOK_SECONDS if received else _LOOK_SECONDS
        most, began = most if left is None else min(most, left), time.monotonic()
        _sleep_until_one_ends(alive, most, others)
        if launch.logs is not None:
            launch.logs.go_on()
        if counts is not None:
            counts.go_on([worker for worker in workers if worker.end is None])
        late_seconds = time.monotonic() - began - most
        if late_seconds > _LATE_SECONDS:
            deadline = None if deadline is None else deadline + late_seconds
            stop.extend(late_seconds)
            if watchdog is not None:
                watchdog.resume()
        if watchdog is not None and deadline is None:
            hang = _hang(launch, workers, memory, watchdog, survey)
            if hang is not None:
                return hang


def _time_to_stop(
    launch: Launch, stop: StopLimit, workers: list[Worker], memory: SurvivingMemory, survey: HangSurvey | None
) -> float:
    """Return the seconds that ranks have left after a stop signal; report why the stop waits, and where ranks are."""
    alive = [worker.rank for worker in workers if worker.end is None]
    seconds = stop.seconds_left(alive)
    last = min(memory.heartbeats.last(rank).time for rank in alive)
    if stop.is_half_over(seconds) and launch.hangs is not None and last:
        if survey is None:
            _report_stop(launch, workers, explain(examine(workers, memory.heartbeats), time.monotonic() - last).text)
        else:
            survey.ask(time.monotonic() - last, is_confirmed=False)
    if survey is not None and (found := survey.advance()) is not None:
        _report_stop(launch, workers, found[0].text)
    if (text := stop.reason_once(alive)) is not None:
        _report_stop(launch, workers, text)
    return seconds


def _report_stop(launch: Launch, workers: list[Worker], text: str) -> None:
    """Print the reason for a slow stop; a step that is merely long is recorded as no hang."""
    if launch.orders.stopped_by is None:  # it was printed before these ranks started
        _print_status(launch, workers, text)


def _print_status(launch: Launch, workers: list[Worker], text: str) -> None:
    if launch.listener is not None:
        show_pending_output(launch, workers)
        launch.listener.print_status(text)


def _ask_the_others_too(launch: Launch, alive: list[Worker], ends: list[WorkerEnd]) -> None:
    """Forward a signal that only one rank received: the others would otherwise use up their grace time."""
    number = stop_signal(ends)
    assert number is not None
    pass_on_signal(number, alive, is_first=True)
    launch.nodes.send_signal(number)


def call_counts(launch: Launch, watchdog: Watchdog | None) -> CallCounts | None:
    """Return the reader of the ranks' call counts, or None if calls do not count as progress."""
    if watchdog is None or launch.hangs is None or not launch.hangs.counts_calls:
        return None
    return CallCounts(watchdog, _COUNTS_OF_A_LIMIT * (launch.hangs.hang_after or LEAST_SECONDS))


def hang_survey(
    launch: Launch,
    workers: list[Worker],
    memory: SurvivingMemory,
    watchdog: Watchdog | None = None,
    received: Sequence[int] = (),
) -> HangSurvey | None:
    """Return the survey of all nodes, or None if there are no others."""
    hangs = launch.hangs
    if launch.nodes.is_alone or hangs is None:
        return None

    def decide(verdict: HangVerdict, seconds: float) -> tuple[HangVerdict, bool]:
        # ranks that were asked to stop have their own limit
        return (verdict, False) if watchdog is None or received else _decided(hangs, watchdog, verdict, seconds)

    def examine_own() -> list[RankState]:
        return examine(workers, memory.heartbeats)

    if watchdog is None:
        return HangSurvey(launch.nodes, examine_own, decide)
    return HangSurvey(launch.nodes, examine_own, decide, watchdog.report_again_soon)


def _decided(hangs: HangPolicy, watchdog: Watchdog, verdict: HangVerdict, seconds: float) -> tuple[HangVerdict, bool]:
    """Return the verdict with its announcement, and whether to act on it now."""
    if hangs.counts_calls and not watchdog.is_known and not verdict.is_waited:
        return verdict, False  # ranks of a script without steps that do not wait may be computing
    if not watchdog.is_begun and not verdict.is_certain:
        return verdict, False  # a rank may take any time to start, and the others wait for it
    limit, is_certain = watchdog.last_threshold, verdict.is_certain
    announced = verdict.announcing(hangs.announcement(seconds, limit, is_certain=is_certain))
    return announced, hangs.acts(seconds, limit, is_certain=is_certain)


def _hang(
    launch: Launch, workers: list[Worker], memory: SurvivingMemory, watchdog: Watchdog, survey: HangSurvey | None
) -> HangVerdict | None:
    """Report ranks that hang; return the verdict if they are to be ended."""
    seconds = watchdog.silent_seconds([worker.rank for worker in workers if worker.end is None])
    if launch.hangs is not None and not launch.hangs.counts_calls and (notice := watchdog.notice()) is not None:
        _print_status(launch, workers, notice)
    if survey is not None:
        if seconds is not None and not launch.nodes.is_one_quiet:
            survey.ask(seconds, only_if_waited=_only_if_waited(watchdog, seconds))
        found = survey.advance()
        if found is not None:
            report_hang(launch, workers, found[0])
        return found[0] if found is not None and found[1] else None
    if seconds is None or launch.hangs is None:
        return None
    verdict = explain(examine(workers, memory.heartbeats), seconds)
    is_nothing = not verdict.is_waited and _only_if_waited(watchdog, seconds)
    # ranks are probed one after the other, and states of ranks that make progress may be inconsistent
    if is_nothing or (verdict.is_certain and verdict.has_moved(examine(workers, memory.heartbeats))):
        watchdog.report_again_soon(seconds)
        return None
    verdict, acts = _decided(launch.hangs, watchdog, verdict, seconds)
    report_hang(launch, workers, verdict)
    return verdict if acts else None


def _only_if_waited(watchdog: Watchdog, seconds: float) -> bool:
    """Return whether silence alone proves nothing: ranks that have made calls need not make more of them."""
    return not watchdog.is_known and seconds < UNKNOWN_SECONDS


def _still_alive(workers: list[Worker]) -> list[Worker]:
    for worker in workers:
        if worker.end is None:
            worker.poll()
    return [worker for worker in workers if worker.end is None]


def _exchange_events(launch: Launch, workers: list[Worker], received: list[int], ending: str | None) -> float | None:
    """Exchange events with the other nodes; return the seconds that they leave the ranks here, or None for no limit."""
    nodes = launch.nodes
    nodes.pump()
    for number in nodes.exchange_signals(received):
        pass_on_signal(number, workers, is_first=len(received) == 1)
    if ending is not None:
        nodes.send_ending(ending)
    if nodes.news.interrupted_because is not None:
        return 0.0  # all are restarted anyway
    if nodes.lost is not None or nodes.refusal is not None:
        return _FAILURE_GRACE_SECONDS
    graces = [_grace(why, launch) for why in nodes.news.endings]
    return _least(*graces) if graces else None


def _fall_silent(launch: Launch, alive: list[Worker]) -> None:
    """Stop the ranks and send nothing for a while, if an injected fault requests it."""
    seconds = max((asked for worker in alive if (asked := worker.asked_cut()) is not None), default=None)
    if seconds is None:
        return
    for worker in alive:
        worker.send(signal.SIGSTOP)
    time.sleep(seconds)
    nodes = launch.nodes
    nodes.pump()
    if nodes.news.interrupted_because is None and nodes.lost is None:  # otherwise they are ended anyway
        for worker in alive:
            worker.send(signal.SIGCONT)


def _least(*graces: float | None) -> float | None:
    return min((grace for grace in graces if grace is not None), default=None)


def ending_of(ends: list[WorkerEnd]) -> str | None:
    """Return what the first ranks to end imply for the others: `failed`, `stopped`, `ended`, or None."""
    ends = [end for end in ends if not end.is_tolerated]
    if any(end.exit_code != 0 and end.stop_signal is None for end in ends):
        return "failed"
    if any(end.stop_signal is not None for end in ends):
        return "stopped"
    return "ended" if ends else None


def _grace(ending: str | None, launch: Launch, ends: Sequence[WorkerEnd] = ()) -> float | None:
    """Return the grace time of the other ranks in seconds; None for no limit."""
    if ending == "failed":
        if not launch.restarts.most or (launch.restarts.after_any and may_follow_another([*ends])):
            return _FAILURE_GRACE_SECONDS
        was_killed = any(end.failure is None and end.exit_code < 0 and end.exit_code not in STOP_ENDS for end in ends)
        return 0.0 if was_killed else _RESTART_GRACE_SECONDS
    if ending == "stopped":
        return launch.stop_grace_seconds
    return launch.end_grace_seconds if ending == "ended" else None


def _sleep_until_one_ends(alive: list[Worker], most_seconds: float, others: Sequence[int] = ()) -> None:
    pidfds = [worker.pidfd for worker in alive if worker.pidfd is not None]
    if len(pidfds) < len(alive):
        time.sleep(min(_POLL_SECONDS, most_seconds))
        return
    poll = select.poll()  # select() accepts no descriptor above 1023
    for descriptor in (*pidfds, *others):
        poll.register(descriptor, select.POLLIN)
    poll.poll(most_seconds * 1000)


def kill_all(launch: Launch, workers: list[Worker]) -> None:
    """Kill the remaining workers, and wait until they are gone; say why if that takes long."""
    for worker in workers:
        worker.stop_at_once()
    began, notice_seconds, pause = time.monotonic(), _KILL_NOTICE_SECONDS, 0.001
    while alive := _still_alive(workers):
        seconds = time.monotonic() - began
        if seconds > notice_seconds:
            notice_seconds = 2 * seconds
            reasons = [(worker, why) for worker in alive if (why := why_alive(worker.pid)) is not None]
            texts = [f"rank {worker.rank} (process {worker.pid}) {why}" for worker, why in reasons]
            text = "; ".join(texts) or f"waiting for {_ranks_of(alive)}, which the system has not ended yet"
            _print_status(launch, workers, f"killed {seconds:.0f} s ago, and not gone: {text}")
        time.sleep(pause)
        pause = min(0.05, 1.1 * pause)


def _ranks_of(workers: Sequence[Worker]) -> str:
    return f"rank{'s' * (len(workers) > 1)} {few([worker.rank for worker in workers], 8)}"


def _store_served(launch: Launch, store: StoreSocket, *, by_fork: bool) -> AbstractContextManager[object]:
    if not launch.serves_store or store.listener is None:
        return nullcontext()
    return closing(StoreServer(store.listener, by_fork=by_fork))


def decide_to_fork(launch: Launch) -> bool:
    """Return whether ranks are forked.

    Raises:
        EnvironmentLacks: Fork was requested where it cannot work.
    """
    if launch.start != "fork":
        return launch.start == "auto" and reason_not_to_fork() is None
    reason = reason_fork_would_fail(launch.threads)
    if reason is not None:
        raise EnvironmentLacks(f"start is fork but {reason}: use --start spawn, or auto")
    return True


def listening_on(host: str) -> socket.socket:
    """Return a socket that listens on a free port of an address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)
