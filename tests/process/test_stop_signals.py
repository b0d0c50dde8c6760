"""Stop signals that are held back while a process is started, where the system may give them to another thread."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dure.process.stop_signals import signals_held_back


@pytest.fixture
def received() -> Iterator[list[int]]:
    """Handle two signals, in a process with another thread, which blocks none."""
    numbers: list[int] = []
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    stopping = (signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, lambda number, frame: numbers.append(number)) for number in stopping}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)
    is_over.set()
    thread.join()


def is_blocked_and_handled() -> tuple[set[int], object]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGTERM)


def test_signals_when_another_thread_gets_them_then_the_handler_is_called_afterwards(received):
    before = is_blocked_and_handled()
    with signals_held_back():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            time.sleep(0.05)  # the other thread has to run
        assert received == []
    assert received == [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]
    assert is_blocked_and_handled() == before


def test_signals_when_a_handler_raises_then_all_is_as_before(received):
    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt("stopped")

    def work() -> None:
        with signals_held_back():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            received.append(0)

    signal.signal(signal.SIGTERM, stop)
    before = is_blocked_and_handled()
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        work()
    assert received == [0]
    assert is_blocked_and_handled() == before


def test_signals_when_a_handler_raises_from_the_call_that_blocks_them_then_none_is_left_blocked(monkeypatch):
    block = signal.pthread_sigmask

    def block_and_raise(how: int, numbers: object) -> object:
        mask = block(how, numbers)
        if how == signal.SIG_BLOCK and numbers:
            raise KeyboardInterrupt("stopped")
        return mask

    before = is_blocked_and_handled()
    monkeypatch.setattr(signal, "pthread_sigmask", block_and_raise)
    with pytest.raises(KeyboardInterrupt, match="stopped"), signals_held_back():
        pass
    monkeypatch.undo()
    assert is_blocked_and_handled() == before


def test_signals_when_the_process_ignores_one_then_so_does_a_program_that_is_started():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_held_back():
            code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
            done = subprocess.run([sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.stdout == "True\n"


def test_signals_when_held_back_in_another_thread_then_handlers_stay(received):
    def work() -> None:
        with signals_held_back():
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
