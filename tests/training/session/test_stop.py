"""Further stop signals as impatience, where nobody supervises."""

import signal

import pytest

from dure.process import stop_signals
from dure.training.session import stop_request as stop
from dure.training.session.stop_request import StoppedAtOnce, StopSignals


def twice(number: int) -> int | None:
    """Get a stop signal two times, and return the one that was taken for a wish."""
    with StopSignals() as signals:
        signals.defer()
        signal.raise_signal(number)
        signal.raise_signal(number)
        return signals.received


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_when_it_comes_again_then_the_rank_ends_at_once(number, monkeypatch):
    assert twice(number) == number  # within half a second it is the same wish
    monkeypatch.setattr(stop, "_SECOND_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(stop_signals, "ONE_WISH_SECONDS", 0.0)
    with pytest.raises(StoppedAtOnce, match=signal.Signals(number).name):
        twice(number)


def test_sigterm_when_slurm_says_it_again_then_it_is_the_same_wish(monkeypatch):
    monkeypatch.setattr(stop, "_SECOND_AFTER_SECONDS", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert twice(signal.SIGTERM) == signal.SIGTERM
    with pytest.raises(StoppedAtOnce, match="SIGINT"):
        twice(signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_when_a_program_sends_it_twice_then_it_is_the_same_wish(number, monkeypatch):
    monkeypatch.setattr(stop, "_SECOND_AFTER_SECONDS", 0.0)
    assert twice(number) == number
