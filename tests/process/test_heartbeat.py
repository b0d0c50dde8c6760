"""Ranks tell where they are, and whoever holds the memory can read it."""

import os
import time

from dure.process.heartbeat import Heartbeats, Pace


def test_beat_when_told_by_another_process_then_it_is_read_here():
    descriptor = os.memfd_create("beats")
    beats = Heartbeats(descriptor, 3)
    assert [beats.last(rank).step for rank in range(3)] == [-1, -1, -1]
    pid = os.fork()
    if pid == 0:
        Heartbeats(descriptor, 3).beat(1, 42, sequence=7)
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(descriptor)
    assert [beats.last(rank).step for rank in range(3)] == [-1, 42, -1]
    assert [beats.last(rank).sequence for rank in range(3)] == [-1, 7, -1]
    assert 0 <= time.monotonic() - beats.last(1).time < 60
    assert beats.paces(1)["training"] == Pace()
    beats.forget()
    assert beats.last(1).step == -1


def test_pace_then_is_how_long_each_phase_let_one_wait(monkeypatch):
    descriptor = os.memfd_create("beats")
    beats = Heartbeats(descriptor, 2)
    os.close(descriptor)
    for now, phase in [(1.0, "starting"), (5.0, "training"), (6.0, "training"), (9.0, "saving"), (9.5, "training")]:
        monkeypatch.setattr("dure.process.heartbeat.time.monotonic", lambda now=now: now)
        beats.beat(1, 0, phase)
    paces = {phase: pace for phase, pace in beats.paces(1).items() if pace.count}
    assert paces == {
        "starting": Pace(count=1, seconds=4.0, longest_seconds=4.0),
        "training": Pace(count=2, seconds=4.0, longest_seconds=3.0),
        "saving": Pace(count=1, seconds=0.5, longest_seconds=0.5),
    }
    assert beats.paces(0)["training"] == Pace()
