"""Ranks tell where they are, and whoever holds the memory can read it."""

import os
import time

from dure.heartbeat import Heartbeats


def test_beat_when_told_by_another_process_then_it_is_read_here():
    descriptor = os.memfd_create("beats")
    beats = Heartbeats(descriptor, 3)
    assert [beats.last(rank).step for rank in range(3)] == [-1, -1, -1]
    pid = os.fork()
    if pid == 0:
        Heartbeats(descriptor, 3).beat(1, 42)
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(descriptor)
    assert [beats.last(rank).step for rank in range(3)] == [-1, 42, -1]
    assert 0 <= time.monotonic() - beats.last(1).time < 60
    beats.forget()
    assert beats.last(1).step == -1
