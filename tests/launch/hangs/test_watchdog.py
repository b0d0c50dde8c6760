"""Silence of ranks that counts as a hang, and silence that does not."""

import os

import pytest

from dure.launch.hangs import watchdog as module
from dure.launch.hangs.watchdog import HangPolicy, Watchdog
from dure.launch.worker.worker_process import unnamed_file
from dure.process.heartbeat import Heartbeats


class Ranks:
    """Two ranks whose clock is ours."""

    def __init__(self, monkeypatch, hang_after=None):
        descriptor = unnamed_file("test")
        self.now = 100.0
        monkeypatch.setattr("dure.process.heartbeat.time.monotonic", lambda: self.now)
        self.writers = [Heartbeats(descriptor, 2) for _ in range(2)]
        self.watchdog = Watchdog(Heartbeats(descriptor, 2), hang_after, clock=lambda: self.now)
        os.close(descriptor)
        self.step = 0

    def steps(self, number, seconds=1.0, phase="training", ranks=(0, 1), *, looks=True):
        for _ in range(number):
            self.now += seconds
            self.step += 1
            for rank in ranks:
                self.writers[rank].beat(rank, self.step, phase)
            if looks:
                self.watchdog.silent_seconds([0, 1])

    def wait(self, seconds):
        """Look twice a second, as the supervisor does; return what was seen first, if anything."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            silent = self.watchdog.silent_seconds([0, 1])
            if silent is not None:
                return silent
        return None


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def test_silence_when_steps_are_short_then_ten_seconds_are_a_hang(ranks):
    ranks.steps(5, seconds=0.1)
    assert ranks.wait(10.0) is None
    assert ranks.wait(1.0) == pytest.approx(10.5)


def test_silence_when_steps_are_long_then_ten_of_them_are_a_hang(ranks):
    ranks.steps(5, seconds=4.0)
    assert ranks.wait(40.0) is None
    assert ranks.wait(1.0) == pytest.approx(40.5)


def test_silence_when_one_step_took_long_before_then_three_times_that_is_waited_for(ranks):
    ranks.steps(5, seconds=0.1)
    for _ in range(8):  # nine seconds with the supervisor looking
        ranks.wait(1.0)
    ranks.steps(1, seconds=1.0)
    assert ranks.watchdog.threshold("training") == pytest.approx(27.0)


def test_silence_when_one_rank_goes_on_then_the_other_hangs_all_the_same(ranks):
    ranks.steps(5, seconds=0.1)
    ranks.steps(20, seconds=0.5, ranks=(0,))
    assert ranks.wait(1.0) == pytest.approx(10.5)


def test_silence_when_the_first_step_compiles_then_it_has_minutes(ranks):
    ranks.steps(1)
    assert ranks.wait(module.UNKNOWN_SECONDS) is None
    assert ranks.wait(1.0) is not None


def test_silence_when_many_steps_came_before_the_first_look_then_they_count(ranks):
    ranks.steps(8, seconds=0.01, looks=False)
    assert ranks.wait(10.0) is None
    assert ranks.wait(1.0) == pytest.approx(10.5)


def test_silence_when_a_phase_begins_after_many_quick_steps_then_it_has_minutes_all_the_same(ranks):
    ranks.steps(5, seconds=0.1)
    ranks.steps(9, seconds=0.01, looks=False)
    ranks.steps(1, phase="saving")
    assert ranks.wait(60.0) is None


def test_silence_when_phases_change_between_looks_then_each_is_known(ranks):
    for _ in range(4):
        ranks.steps(1, seconds=0.01, looks=False)
        ranks.steps(1, seconds=0.01, phase="evaluating", looks=False)
    assert ranks.wait(10.0) is None
    assert ranks.wait(1.0) == pytest.approx(10.5)


def test_silence_when_one_step_of_many_took_long_then_it_is_not_lost_among_them(ranks):
    ranks.steps(1, looks=False)
    ranks.steps(1, seconds=8.0, looks=False)
    ranks.steps(99, seconds=0.01, looks=False)
    assert ranks.wait(23.5) is None
    assert ranks.wait(1.0) == pytest.approx(24.25, abs=0.3)


def test_silence_when_a_phase_is_new_then_it_has_minutes(ranks):
    ranks.steps(5, seconds=0.1)
    ranks.steps(1, phase="saving")
    assert ranks.wait(60.0) is None


def test_silence_when_told_then_it_is_told_again_when_it_has_doubled(ranks):
    ranks.steps(5, seconds=0.1)
    assert ranks.wait(20.0) == pytest.approx(10.5)
    assert ranks.wait(10.0) is None
    assert ranks.wait(2.0) == pytest.approx(21.5)


def test_silence_when_no_rank_has_told_anything_then_is_counted_from_the_start(ranks):
    assert ranks.wait(module.UNKNOWN_SECONDS) is None
    assert ranks.wait(1.0) == pytest.approx(module.UNKNOWN_SECONDS + 0.5)
    assert not ranks.watchdog.is_begun


def test_silence_when_one_rank_has_told_nothing_and_the_other_goes_on_then_is_a_hang(ranks):
    ranks.steps(299, ranks=(0,))
    assert ranks.watchdog.is_begun
    assert ranks.wait(2.0) == pytest.approx(module.UNKNOWN_SECONDS + 0.5)


def test_hang_after_when_it_is_short_then_a_start_has_a_minute_all_the_same(monkeypatch):
    ranks = Ranks(monkeypatch, hang_after=3.0)
    assert ranks.wait(module.START_SECONDS) is None
    assert ranks.wait(1.0) == pytest.approx(module.START_SECONDS + 0.5)


def test_hang_after_when_a_rank_has_made_calls_and_no_step_then_it_is_the_limit(monkeypatch):
    ranks = Ranks(monkeypatch, hang_after=3.0)
    for rank in (0, 1):
        ranks.watchdog.note_calls(rank, 1)
    assert ranks.wait(3.0) is None
    assert ranks.wait(1.0) == pytest.approx(3.5)


def test_hang_after_when_it_is_long_then_a_start_has_as_much(monkeypatch):
    ranks = Ranks(monkeypatch, hang_after=1000.0)
    assert ranks.wait(1000.0) is None
    assert ranks.wait(1.0) == pytest.approx(1000.5)


def test_silence_when_the_supervisor_was_stopped_too_then_begins_anew(ranks):
    ranks.steps(5, seconds=0.1)
    ranks.now += 3600.0
    assert ranks.watchdog.silent_seconds([0, 1]) is None
    assert ranks.wait(9.0) is None


def test_silence_when_the_supervisor_knows_that_it_was_stopped_then_begins_anew(monkeypatch):
    ranks = Ranks(monkeypatch, hang_after=3.0)
    ranks.steps(5, seconds=0.1)
    ranks.now += 4.0  # shorter than the gap by which it finds out itself
    ranks.watchdog.resume()
    assert ranks.wait(2.5) is None
    assert ranks.wait(1.0) == pytest.approx(3.0, abs=0.5)


def test_threshold_when_ranks_are_in_different_phases_then_is_that_of_the_silent_one(ranks):
    ranks.steps(5, seconds=0.1)
    ranks.steps(1, seconds=0.1, phase="saving", ranks=(1,))
    assert ranks.wait(11.0) == pytest.approx(10.5, abs=0.5)
    assert ranks.watchdog.last_threshold == module.LEAST_SECONDS


def test_silence_when_a_script_makes_calls_and_no_steps_then_ten_seconds_without_one_are_a_hang(ranks):
    ranks.steps(1, phase="starting")
    for count in range(1, 5):
        for rank in (0, 1):
            ranks.watchdog.note_calls(rank, count)
        assert ranks.wait(3.0) is None
    assert ranks.wait(8.0) == pytest.approx(10.5)
    assert not ranks.watchdog.is_known


def test_silence_when_calls_were_far_apart_before_then_three_times_that_is_waited_for(ranks):
    ranks.steps(1, phase="starting")
    ranks.watchdog.note_calls(0, 1)
    assert ranks.wait(9.0) is None
    ranks.watchdog.note_calls(0, 2)
    assert ranks.wait(27.0) is None
    assert ranks.wait(1.0) is not None


def test_silence_when_it_was_no_hang_then_is_looked_at_again_ten_seconds_later(ranks):
    ranks.steps(1, phase="starting")
    ranks.watchdog.note_calls(0, 1)
    seconds = ranks.wait(11.0)
    ranks.watchdog.report_again_soon(seconds)
    assert ranks.wait(9.5) is None
    assert ranks.wait(1.5) == pytest.approx(seconds + 10.5, abs=0.6)


def test_silence_when_a_rank_cannot_answer_and_others_make_calls_then_is_none(ranks):
    ranks.steps(1, phase="starting")
    ranks.watchdog.note_calls(0, 1)
    ranks.watchdog.note_calls(1, 1)
    ranks.watchdog.mute.add(1)
    for count in range(2, 8):
        assert ranks.wait(4.0) is None
        ranks.watchdog.note_calls(0, count)


def test_silence_when_it_has_come_to_the_limit_of_who_may_be_slow_then_is_told_then(ranks):
    ranks.steps(5, seconds=0.1)
    told = [ranks.wait(100.0) for _ in range(4)]
    assert told == pytest.approx([10.5, 21.5, 43.5, 60.5], abs=0.6)


def test_hang_after_when_given_then_holds_in_every_phase(monkeypatch):
    ranks = Ranks(monkeypatch, hang_after=3.0)
    ranks.steps(1, phase="starting")
    assert ranks.wait(10.0) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("action", "is_certain", "words"),
    [
        ("restart", False, "all ranks are started again after 60 s"),
        ("stop", False, "the run is ended after 60 s"),
        ("stop", True, None),  # it is ended now
        ("wait", False, None),
    ],
)
def test_policy_when_it_waits_then_says_for_how_long(action, is_certain, words):
    said = HangPolicy(action=action).announcement(11.0, 10.0, is_certain=is_certain)
    assert said is None if words is None else words in said


@pytest.mark.parametrize(
    ("action", "hang_after", "seconds", "is_certain", "acts"),
    [
        ("restart", None, 11.0, True, True),
        ("restart", None, 11.0, False, False),  # it may only be slow
        ("restart", None, 61.0, False, True),
        ("stop", 5.0, 6.0, False, True),
        ("wait", 5.0, 600.0, True, False),
    ],
)
def test_policy_then_acts_when_it_is_time(action, hang_after, seconds, is_certain, acts):
    policy = HangPolicy(action=action, hang_after=hang_after)
    assert policy.acts(seconds, 10.0, is_certain=is_certain) is acts


@pytest.mark.parametrize(("phase", "what"), [("training", "in step 1"), ("evaluating", "evaluating")])
def test_notice_when_a_phase_of_unknown_length_lasts_then_it_is_given_each_time_that_has_doubled(ranks, phase, what):
    ranks.steps(1, phase=phase, looks=False)
    notices = []
    for _ in range(50):
        ranks.wait(1.0)
        if (notice := ranks.watchdog.notice()) is not None:
            notices.append(notice)
    after = "s now; after 300 s it is examined as a hang"
    assert notices == [f"still {what}, for {seconds} {after}" for seconds in (11, 23, 47)]
    ranks.steps(1)
    assert ranks.watchdog.notice() is None


def test_notice_when_usual_durations_are_known_or_no_rank_has_begun_then_there_is_none(ranks):
    ranks.wait(30.0)
    assert ranks.watchdog.notice() is None
    ranks.steps(5, seconds=0.1)
    ranks.wait(30.0)
    assert ranks.watchdog.notice() is None
