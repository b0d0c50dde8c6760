"""Promises that README and the table of strategies make of a disturbed run, checked on one case.

Each function yields a sentence for every promise that was broken.
"""

import math
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from campaign_case import (
    ADD_IN_ANY_ORDER,
    CRASHES,
    EPOCHS,
    EVAL_SAMPLES,
    HANG_AFTER_SECONDS,
    IN_THE_TASK,
    SAMPLES,
    STEPS,
    STOPS,
    Case,
)
from campaign_run import Seen, is_complete

from dure.process.stop_signals import stop_exit_code
from dure.strategies.table import STRATEGIES
from dure.training.checkpoints.reader import verify
from tests.faults.test_kill_and_resume import TOLERANCE, answers

Weights = Mapping[str, torch.Tensor]

STEPS_TO_REACT = 6
"""Steps from the end of a run within which a fault may come too late to change how it ends."""
BOUND_SECONDS = {"hang": 25.0, "SIGSTOP": 30.0, "full disk": 15.0, "cut": 30.0}
OTHER_BOUND_SECONDS = 15.0
"""Seconds from the fault to the end of the run, the rest of training (about 2 s) and a busy machine included."""
WORDS = {"SIGKILL": "SIGKILL", "SIGSEGV": "SIGSEGV", "raise": "a planned failure", "hang": "because they hung"}
"""Parts of the message by which a run that is not started again names what ended it."""
MOST_RANKS = 8


def broken_promises(case: Case, seen: Seen, folder: Path, control: Weights, weights: Weights | None) -> Iterator[str]:
    """Yield what did not come true.

    Args:
        case: What was to happen.
        seen: What came of it.
        folder: The case's own; temporary files went there, too.
        control: Weights of the same run, undisturbed.
        weights: Weights at the end; None if the run did not come to one.
    """
    yield from of_the_end(case, seen)
    yield from of_what_is_left(case, seen, folder)
    if weights is not None:
        yield from of_samples(case, seen)
        yield from of_repeated_steps(case, seen)
        yield from of_weights(case, seen, control, weights)
        yield from of_files(seen)


def of_the_end(case: Case, seen: Seen) -> Iterator[str]:
    """Check exit codes, messages, status and time."""
    for node, (command, code) in enumerate(zip(seen.commands, seen.codes, strict=True)):
        codes = promised_codes(case, seen, node)
        last = command.err[-600:]
        if code not in codes:
            yield f"exit code {code} instead of {' or '.join(map(str, sorted(codes)))}: {last!r}"
        elif code > 0 and not any(word in command.err for word in promised_words(case, code)):
            yield f"exit code {code} with a message that does not say why: {last!r}"
        # the task's own failure has one, and so has torch's of a loader, which comes in the midst of the task's line
        may_have_traceback = code == 1 and (case.fault.kind in IN_THE_TASK or case.fault.target == "loader")
        if "Traceback" in command.err and not may_have_traceback:
            yield f"a traceback: {last!r}"
    bound = BOUND_SECONDS.get(case.fault.kind, OTHER_BOUND_SECONDS)
    if case.start == "spawn":
        bound += (1 + len(seen.run.events("restart"))) * start_seconds(seen)
    if seen.seconds > bound:
        yield f"the end took {seen.seconds:.1f} s, more than {bound:g}"
    if seen.resumed is not None and seen.resumed.code != 0:
        yield f"it cannot be resumed, exit code {seen.resumed.code}: {seen.resumed.err[-600:]!r}"
    elif seen.run.path.exists() and min(seen.codes) >= 0:
        yield from of_the_summary(seen)


def start_seconds(seen: Seen) -> float:
    """Return how long the first start took: spawned ranks, which import torch, take as long again for a restart."""
    attempts, trainings = seen.run.events("attempt"), seen.run.events("training")
    return trainings[0]["time"] - attempts[0]["time"] if trainings else 0.0


def of_the_summary(seen: Seen) -> Iterator[str]:
    """Check that the summary is there and says how the run ended."""
    if not (seen.run.path / "summary.json").exists():
        # a disk that is still full at the end takes nothing, and the command says so
        if not any("summary.json cannot be written: the disk is full" in command.err for command in seen.commands):
            yield "there is no summary.json"
        return
    is_done = seen.resumed is not None or 0 in seen.codes
    statuses = {"completed"} if is_done else {"completed", "interrupted", "failed"}
    if (status := seen.run.summary()["status"]) not in statuses:
        yield f"status {status!r} in summary.json"


def promised_codes(case: Case, seen: Seen, node: int) -> set[int]:
    """Return the exit codes with which a command may end."""
    fault = case.fault
    if not seen.happened:
        return {0}
    late = {0} if seen.steps_done() >= STEPS - STEPS_TO_REACT else set()
    if fault.signal in STOPS and is_complete(seen.run):
        late.add(-fault.signal)  # when all is done dure listens no longer, and a shell reads this as the same number
    if fault.kind == "full disk":
        return {0, 2}
    if not seen.run.path.exists():  # before dure listens to signals, the system's own answer
        return {-fault.signal, stop_exit_code(fault.signal)}
    hit = fault.rank % len(seen.commands) == node
    if fault.signal in STOPS and fault.target != "loader":
        return {stop_exit_code(fault.signal)} | late
    if fault.signal in CRASHES and fault.target in ("supervisor", "everybody"):
        if hit:
            return {-fault.signal} | late
        return {0} if case.nnodes == "1:2" else {1} | late
    is_short = fault.seconds < HANG_AFTER_SECONDS  # a rank that waits longer than that for its loader hangs, too
    is_only_held_up = fault.target == "supervisor" or (fault.target == "loader" and is_short)
    if fault.kind == "cut" or fault.signal in STOPS or (fault.signal == signal.SIGSTOP and is_only_held_up):
        return {0}
    if fault.target == "rank again":
        return {0, 1}
    if case.max_restarts > 0:
        return {0}
    if fault.signal == signal.SIGSTOP or is_missed(case):
        return {0, 1}
    return {1} | late


def is_missed(case: Case) -> bool:
    """Return whether it is a worker that the others go on without."""
    is_worker = case.fault.target in ("rank", "two ranks", "loader") and case.fault.rank < case.nproc
    return "--no-parameter-server.sync" in case.options and is_worker


def promised_words(case: Case, code: int) -> tuple[str, ...]:
    """Return parts of messages, of which one is in what a command says at its end."""
    if case.fault.signal in STOPS and case.fault.target != "loader":
        return ("continue with `dure", "starts from the beginning", "stopped")
    if code == 2:
        return ("a checkpoint needs", "No space left", "full")
    if case.fault.target in ("loader", "supervisor", "everybody"):
        return ("dure: ",)
    if case.fault.kind == "out of memory":
        return ("memory",)
    return (WORDS.get(case.fault.kind, "because they hung"),)


def _is_of_others(port: tuple[str, int], folder: Path) -> bool:
    """Return whether programs elsewhere have been given the port since: the kernel gives the same numbers again."""
    listening = [
        one.pid for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port[1]
    ]
    with suppress(psutil.NoSuchProcess):
        return bool(listening) and not any(
            pid is None or psutil.Process(pid).cwd().startswith(str(folder)) for pid in listening
        )
    return False


def of_what_is_left(case: Case, seen: Seen, folder: Path) -> Iterator[str]:
    """Check processes, ports and files."""
    for process in psutil.process_iter(["cwd", "cmdline"]):
        if (process.info["cwd"] or "").startswith(str(folder)) and process.status() != psutil.STATUS_ZOMBIE:
            yield f"a process is left: {process.info['cmdline']}"
    for port in seen.ports:
        if port[0] in ("127.0.0.1", "::1") and answers(port) and not _is_of_others(port, folder):
            yield f"{port[0]}:{port[1]} still answers"
    ours = ("runs", "output-", "hurry", "went-wrong", "secret", "weights")
    if case.num_workers:
        # multiprocessing's in a loader that was killed; torch's, interrupted when it asks why the loader is gone
        ours = (*ours, "pymp-", "tmp")
    for name in os.listdir(folder):
        if not name.startswith(ours):
            yield f"a temporary file is left: {name}"
    was_killed = min(seen.codes) < 0 and seen.resumed is None
    for path in seen.run.path.glob("checkpoints/.*"):
        if not was_killed:
            yield f"half a checkpoint is left: {path.name}"


def of_samples(case: Case, seen: Seen) -> Iterator[str]:
    """Check that each sample of each epoch was used once, or is named as not used, and each step done once."""
    records = [record for rank in range(MOST_RANKS) for record in seen.run.records(rank)]
    used = Counter((record["epoch"], sample) for record in records for sample in record["samples"])
    missing = {(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)} - used.keys()
    twice = {sample: count for sample, count in used.items() if count > 1}
    if twice:
        yield f"samples were used twice: {twice}"
    lost = seen.run.events("rank_lost")
    named = {(share["epoch"], sample) for event in lost for share in event["shares"] for sample in share["samples"]}
    if lost:
        # the last records of a worker that was killed may not have been written
        before = max(event["shares"][0]["step"] if event["shares"] else STEPS for event in lost)
        seen_before = {(record["epoch"], record["step"]) for record in records if record["step"] < before}
        missing = {one for one in missing - named if one[0] not in {epoch for epoch, _ in seen_before}}
        if wrong := named & used.keys():
            yield f"samples are named as not used, but were: {wrong}"
    if missing:
        yield f"samples were not used: {missing}"
    steps = [record["step"] for record in seen.run.records(0)]
    if steps != list(range(1, STEPS + 1)) and not any(event["rank"] == 0 for event in lost):
        yield f"steps are {steps}"
    summary = seen.run.summary()
    if summary["samples"] != EPOCHS * SAMPLES:
        yield f"summary.json has {summary['samples']} samples"
    if summary["metrics"]["loss"]["count"] != EVAL_SAMPLES:
        yield f"{summary['metrics']['loss']['count']} samples were evaluated"


def of_repeated_steps(case: Case, seen: Seen) -> Iterator[str]:
    """Check that a restart repeats one step at most, where a snapshot follows each."""
    if case.snapshot_every != 1 or not case.is_synchronous or seen.resumed is not None or case.nnodes == "1:2":
        return
    repeated = len({record["step"] for record in seen.run.undone()})
    restarts = len(seen.run.events("restart")) + len(seen.run.events("microbatch_halved"))
    if repeated > restarts:
        yield f"{repeated} steps were repeated after {restarts} restarts"


def of_weights(case: Case, seen: Seen, control: Weights, weights: Weights) -> Iterator[str]:
    """Check the weights: the undisturbed run's where the strategy is exact, finite elsewhere."""
    if not all(tensor.isfinite().all() for tensor in weights.values()):
        yield "weights are not finite"
    if not math.isfinite(seen.run.summary()["final_loss"] or math.nan):
        yield f"the final loss is {seen.run.summary()['final_loss']}"
    if not case.is_synchronous or seen.run.events("rank_lost"):
        return
    is_same = not case.is_on_hosts and case.resumed_as is None and case.strategy not in ADD_IN_ANY_ORDER
    is_same = is_same and not seen.run.events("microbatch_halved")
    if seen.run.events("microbatch_halved") and case.dropout:
        return
    difference = max(float((weights[name] - tensor).abs().max()) for name, tensor in control.items())
    if difference > (0.0 if is_same else TOLERANCE):
        yield f"weights differ from the undisturbed run's by {difference:.1e}"


def of_files(seen: Seen) -> Iterator[str]:
    """Check that every checkpoint is what its manifest says."""
    found = sorted(seen.run.path.glob("checkpoints/samples-*"))
    if not found:
        yield "there is no checkpoint at the end"
    for path in found:
        try:
            verify(path)
        except Exception as error:
            yield f"{path.name} does not verify: {error}"


def check_control(case: Case, control: Weights, single: Weights) -> Iterator[str]:
    """Check an undisturbed run against the one-process run, which defines what it is to come to."""
    if not STRATEGIES[case.strategy].is_exact or "--no-parameter-server.sync" in case.options or case.dropout:
        return
    difference = max(float((control[name] - tensor).abs().max()) for name, tensor in single.items())
    if difference > TOLERANCE:
        yield f"undisturbed weights differ from single's by {difference:.1e}"
