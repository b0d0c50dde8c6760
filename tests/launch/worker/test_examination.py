"""Probes of ranks, sent to processes that answer as ranks do."""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import pytest

from dure.failures.frames import Frame
from dure.launch.hangs.probe import examine
from dure.launch.worker.questions import Questions
from dure.launch.worker.responder import LENGTH, STACKS_SIGNAL
from dure.launch.worker.worker_process import Worker, unnamed_file
from dure.process.heartbeat import Heartbeats

ANSWER = {
    "main": [["/home/me/train.py", 33, "train"]], "others": [], "collectives": [], "call": None, "called": None,
    "groups": {}, "calls": 3, "handled": None,
}  # fmt: skip


def started(work: Callable[[socket.socket, int], object]) -> Worker:
    """Start a process that is looked at; `work` gets its end of the questions and the file for its stacks."""
    mine, theirs = socket.socketpair()
    stacks, report = unnamed_file("stacks"), unnamed_file("report")
    pid = os.fork()
    if pid == 0:
        try:
            mine.close()
            work(theirs, stacks)
        finally:
            os._exit(0)
    theirs.close()
    return Worker(rank=0, pid=pid, report_fd=report, stacks_fd=stacks, questions=Questions(mine))


def state_of(work: Callable[[socket.socket, int], object]):
    worker = started(work)
    descriptor = unnamed_file("heartbeats")
    try:
        time.sleep(0.1)
        (state,) = examine([worker], Heartbeats(descriptor, 1))
        return state
    finally:
        worker.stop_at_once()
        os.close(descriptor)
        while worker.end is None:
            worker.poll()


def answer(questions: socket.socket) -> None:
    (line,) = questions.recv(100).decode().splitlines()
    body = json.dumps({"number": int(line.split()[1]), **ANSWER}).encode()
    questions.sendall(LENGTH.pack(len(body)) + body)


def test_rank_when_it_answers_then_what_it_says_is_its_state():
    state = state_of(lambda questions, _: answer(questions) or time.sleep(10))
    assert state.main == (Frame(file="/home/me/train.py", line=33, function="train"),)
    assert (state.calls, state.busy_fraction < 0.5) == (3, True)


def test_rank_when_it_waits_for_its_observer_while_it_is_asked_then_is_busy_all_the_same():
    def work(questions: socket.socket, _: int) -> None:
        while not select.select([questions], [], [], 0)[0]:
            pass
        time.sleep(0.3)  # its main thread cannot go on: the one that answers has Python's lock
        answer(questions)
        time.sleep(10)

    assert state_of(work).busy_fraction >= 0.5


def writes(stacks: int, text: str) -> None:
    os.write(stacks, text.encode())


@pytest.mark.skipif(sys.platform != "linux", reason="a signal to one thread")
def test_rank_when_it_cannot_answer_then_its_stacks_are_read_when_they_are_whole():
    def work(_: socket.socket, stacks: int) -> None:
        def handle(*_: object) -> None:
            writes(stacks, 'Thread 0x02 (most recent call first):\n  File "/v/queue.py", line 3 in get\n\n')
            time.sleep(0.05)  # another process has the core
            writes(stacks, 'Thread 0x01 (most recent call first):\n  File "/home/me/train.py", line 33 in train\n')

        signal.signal(STACKS_SIGNAL, handle)
        writes(stacks, f"main thread 0x01\nobserver {threading.get_native_id()}\n")
        while True:
            signal.pause()

    state = state_of(work)
    assert state.collectives is None
    assert state.main == (Frame(file="/home/me/train.py", line=33, function="train"),)


def test_question_when_an_earlier_one_is_answered_late_then_that_answer_is_not_taken():
    mine, theirs = socket.socketpair()
    questions = Questions(mine)
    first, second = questions.ask("state"), questions.ask("state")
    for number in (first, second):
        body = json.dumps({"number": number}).encode()
        assert questions.take(second) is None
        theirs.sendall(LENGTH.pack(len(body)) + body)
    assert questions.take(second) == {"number": second}
    theirs.close()
    assert (questions.take(second), questions.is_over) == (None, True)
    questions.close()
