"""Stop signals that arrive when the ranks have ended, and how they ended is not on record yet."""

import signal
from contextlib import ExitStack

import pytest

from dure.launch.rounds.signal_forwarding import passing_signals_on


@pytest.fixture
def delivered():
    """Return the signals that reach the program itself."""
    found = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGHUP, before)


def test_signal_when_it_comes_before_the_end_is_on_record_then_it_waits(delivered):
    with ExitStack() as until:
        with passing_signals_on([], until):
            pass
        signal.raise_signal(signal.SIGHUP)
        assert delivered == []
    assert delivered == [signal.SIGHUP]


def test_signal_when_the_run_failed_then_the_failure_is_told(delivered):
    def fail() -> None:
        with ExitStack() as until:
            with passing_signals_on([], until):
                pass
            signal.raise_signal(signal.SIGHUP)
            raise RuntimeError("a rank failed")

    with pytest.raises(RuntimeError, match="a rank failed"):
        fail()
    assert delivered == []
    signal.raise_signal(signal.SIGHUP)
    assert delivered == [signal.SIGHUP]


def test_signal_without_a_record_is_delivered_at_once(delivered):
    with passing_signals_on([]):
        pass
    signal.raise_signal(signal.SIGHUP)
    assert delivered == [signal.SIGHUP]
