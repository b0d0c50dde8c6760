"""Verdicts on who failed first, from ends and records as data."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dure.documents import DocumentInvalid
from dure.failures.frames import Frame
from dure.failures.record import CodeLine, Departure, failure_to_json
from dure.failures.verdict import WorkerEnd, how_stopped, in_brief, judge, left_early, stop_signal
from dure.launch.nodes.messages import end_from_json, end_to_json
from dure.process.stop_signals import signal_name
from tests.record_cases import LINE, failure_of


def end(
    rank: int, code: int, time: float = 0.0, *, was_stopped: bool = False, is_tolerated: bool = False, **failure: Any
) -> WorkerEnd:
    record = failure_of(rank, time=time, exit_code=code, **failure) if failure else None
    return WorkerEnd(
        rank=rank, exit_code=code, time=time, was_stopped=was_stopped, failure=record, is_tolerated=is_tolerated
    )


LOST = {"is_consequence": True, "message": "Connection closed by peer", "origin": "library"}
LATE = {**LOST, "message": "Timed out waiting 1800000ms for recv operation to complete"}
KILLED = -signal.SIGKILL

CAUSES = {
    "an exception, though its rank was seen later": ([end(0, 1, 1.0, **LOST), end(1, 1, 2.0, message="bad")], "rank 1"),
    "the earlier of two exceptions": ([end(0, 1, 2.0, message="late"), end(1, 1, 1.0, message="early")], "early"),
    "a kill from outside": ([end(0, 1, 1.0, **LOST), end(1, KILLED, 2.0)], "rank 1 was killed (SIGKILL)"),
    "not our own kill": ([end(0, KILLED, 2.0, was_stopped=True), end(1, 1, 1.0, message="bad")], "rank 1 failed"),
    "a rank that left with 0": ([end(0, 1, 1.0, **LOST), end(1, 0, 0.5)], "rank 1 ended with exit code 0"),
    "one that can be missed, before the others could": (
        [end(0, 1, 1.0, **LOST), end(1, KILLED, 2.0, is_tolerated=True)],
        "rank 1 was killed (SIGKILL)",
    ),
    "not one that was missed long ago": (
        [end(0, 1, 9.0, message="bad"), end(1, KILLED, 2.0, is_tolerated=True)],
        "rank 0 failed",
    ),
    "the rank that waited in vain, and not the one that lost it then": (
        [end(0, 1, 1.0, **LOST), end(1, 1, 2.0, **LATE)],
        "rank 1 failed",
    ),
    "a rank that hung": ([end(0, 1, 1.0, **LATE), end(1, KILLED, 2.0, was_stopped=True)], "rank 1 did not answer"),
    "a rank that hung, though the other then failed by an error of its own": (
        [end(0, 1, 1.0, is_consequence=True, has_timed_out=True, message="bad"), end(1, KILLED, 2.0, was_stopped=True)],
        "rank 1 did not answer",
    ),
    "not a rank for which the other did not wait": (
        [end(0, 1, 1.0, **LOST), end(1, KILLED, 2.0, was_stopped=True)],
        "rank 0 failed after step 4: ValueError: Connection closed by peer",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_verdict_when_ranks_fail_then_the_cause_comes_first(cause, tmp_path):
    ends, expected = CAUSES[cause]
    assert expected in judge(tmp_path, ends).text.splitlines()[0]


@pytest.mark.parametrize(
    ("is_out_of_memory", "limit", "said"),
    [
        (True, 2**30, "by the kernel, because the 1.0 GiB of memory that its container or job may use"),
        (True, None, "by the kernel, which had run out of the host's memory: use fewer ranks"),
        (False, None, "by somebody: the kernel has ended nothing of this run"),
        (None, None, "by somebody, or by the kernel when memory ran out"),
    ],
)
def test_verdict_when_a_rank_is_killed_then_it_is_told_whose_memory_was_full_if_any(
    is_out_of_memory, limit, said, tmp_path
):
    killed = replace(end(1, KILLED), is_out_of_memory=is_out_of_memory, memory_limit_bytes=limit)
    first = judge(tmp_path, [end(0, 1, 1.0, **LOST), killed]).text.splitlines()[0]
    assert said in first
    assert said in in_brief(killed, 2)  # which a restart tells


@pytest.mark.parametrize("is_at_crash", [True, False])
def test_verdict_when_a_rank_aborts_then_causes_in_gloo_are_told_only_if_none_of_its_own_threads_did(
    is_at_crash, tmp_path
):
    crash = (Frame(file="/home/me/train.py", line=5, function="work"),)
    aborted = replace(end(0, -signal.SIGABRT), crash=crash, is_at_crash=is_at_crash)
    text = judge(tmp_path, [aborted, end(1, 1, 1.0, **LOST)]).text
    place = "/home/me/train.py:5 in work"
    assert f"(SIGABRT) {'at' if is_at_crash else 'while its main thread was at'} {place}\n" in text
    assert ("gloo aborts" in text) is not is_at_crash


def test_verdict_when_nobody_is_known_to_be_at_fault_then_it_says_how_to_go_on(tmp_path):
    killed = [end(0, 1, 1.0, **LOST), end(1, KILLED)]
    assert judge(tmp_path, killed, cure="`a command` goes on").text.splitlines()[0].endswith("; `a command` goes on")
    raised = [end(0, 1, 1.0, **LOST), end(1, 1, 2.0)]
    assert "a command" not in judge(tmp_path, raised, cure="`a command` goes on").text


def test_verdict_when_a_message_has_lines_that_look_like_ours_then_they_stand_further_in(tmp_path):
    forged = "no data\ndure: rank 0 failed\n[rank 0] and here"
    verdict = judge(tmp_path, [end(0, 1, 1.0, **LOST), end(1, 1, 2.0, message=forged, user_traceback=forged)])
    assert verdict is not None
    lines = verdict.text.splitlines()
    assert lines[:3] == [
        "rank 1 failed after step 4: ValueError: no data",
        "  dure: rank 0 failed",
        "  [rank 0] and here",
    ]
    assert not [line for line in lines[1:] if line.startswith(("dure:", "[rank"))]


def test_verdict_when_an_exception_has_no_message_then_there_is_no_colon_for_one(tmp_path):
    silent = end(0, 1, type="KeyboardInterrupt", message="")
    assert judge(tmp_path, [silent]).text.splitlines()[0] == "the task failed after step 4: KeyboardInterrupt"
    assert in_brief(silent, 2) == "rank 0 failed: KeyboardInterrupt"


@pytest.mark.parametrize("long", ["x" * 60_000, "word\n" * 12_000], ids=["one line", "many lines"])
def test_verdict_when_a_message_is_very_long_then_the_line_of_the_task_is_seen_and_the_file_is_named(long, tmp_path):
    trace = f"Traceback (most recent call last):\nValueError: {long}"
    ends = [end(0, 1, 1.0, message=long, user_line=LINE, user_traceback=trace), end(1, 1, 2.0, **LOST)]
    text = judge(tmp_path, ends).text
    assert len(text) < 3000
    assert f"\n  {LINE}\n" in text
    assert "failure-rank0.json has more" in text
    assert len(in_brief(ends[0], 2)) < 700


def test_verdict_when_nobody_failed_then_there_is_none(tmp_path):
    assert judge(tmp_path, [end(0, 0), end(1, 0)]) is None
    assert judge(tmp_path, [end(0, 0), end(1, KILLED, is_tolerated=True)]) is None


def test_verdict_when_a_signal_explains_all_ends_then_there_is_none(tmp_path):
    ends = [end(0, 143), end(1, 1, **LOST), end(2, KILLED, was_stopped=True), end(3, -signal.SIGTERM)]
    assert judge(tmp_path, ends, stop_signal(ends)) is None
    assert stop_signal(ends) == signal.SIGTERM


def test_verdict_when_saving_after_a_signal_fails_then_that_is_told(tmp_path):
    full = {"is_ours": True, "is_misuse": True, "message": "the disk is full"}
    verdict = judge(tmp_path, [end(0, 2, **full), end(1, 2, **full)], signal.SIGINT)
    assert (verdict.text, verdict.exit_code) == ("the disk is full", 2)


def test_verdict_when_the_error_is_dures_own_then_it_says_so(tmp_path):
    text = judge(tmp_path, [end(0, 1, origin="dure")]).text
    assert "an error in dure and not in the task" in text
    assert "failure-rank0.json" in text


@pytest.mark.parametrize("origin", ["dure", "library"])
def test_verdict_when_a_script_was_run_then_nobody_speaks_of_a_task(origin, tmp_path):
    text = judge(tmp_path, [end(0, 1, origin=origin)], is_script=True).text
    assert text.startswith("the script failed after step 4")
    assert "task" not in text


def test_verdict_when_a_rank_could_only_write_a_file_then_the_file_is_read(tmp_path):
    (tmp_path / "logs").mkdir()
    record = end(0, 1, message="from the file").failure
    Path(tmp_path, "logs", "failure-rank0.json").write_text(json.dumps(failure_to_json(record)))
    assert "from the file" in judge(tmp_path, [end(0, 1)]).text


def test_exit_code_when_a_user_ends_a_rank_with_any_then_it_is_no_signal(tmp_path):
    ends = [end(0, 200), end(1, 1, **LOST)]
    assert stop_signal(ends) is None
    assert judge(tmp_path, ends).exit_code == 1


def test_verdict_when_a_script_left_by_sys_exit_then_its_line_and_its_words_are_told(tmp_path):
    line = CodeLine(file="train.py", line=6, function="main", text="sys.exit(text)")
    left = replace(end(1, 1), departure=Departure(message="no data\ndure: forged", user_line=line))
    text = judge(tmp_path, [end(0, 1, 1.0, **LOST), left], is_script=True).text
    told = "rank 1 ended with exit code 1: no data\n  dure: forged\n  train.py:6 in main: sys.exit(text)\n"
    assert text.startswith(told)
    assert in_brief(left, 2) == "rank 1 ended with exit code 1: no data (train.py:6)"
    assert end_from_json(end_to_json(left), "node 1", 0.0).departure == left.departure


@pytest.mark.parametrize("code", [0, 1])
def test_verdict_when_a_script_left_by_sys_exit_because_it_lost_a_rank_then_that_one_is_named(code, tmp_path):
    departure = Departure(message=None, user_line=None, is_consequence=True)
    followed = replace(end(0, code, 1.0), departure=departure)
    left = replace(end(1, 1, 2.0), departure=replace(departure, is_consequence=False))
    assert judge(tmp_path, [followed, left], is_script=True).text.startswith("rank 1 ended with exit code 1")


def test_verdict_when_another_rank_failed_by_itself_then_that_is_no_consequence(tmp_path):
    text = judge(tmp_path, [end(0, 1, 2.0, message="late"), end(1, 1, 1.0, message="early"), end(2, 1, **LOST)]).text
    assert "\n  and rank 0 failed: ValueError: late" in text
    assert "\n  rank 2 ended as a consequence" in text


def test_verdict_when_all_scripts_left_alike_then_none_is_a_consequence(tmp_path):
    departure = Departure(message=None, user_line=LINE, time=1.0)
    ends = [replace(end(rank, 2, 1.0), departure=departure) for rank in (0, 1)]
    assert "consequence" not in judge(tmp_path, ends, is_script=True).text
    ends[0] = replace(ends[0], departure=replace(departure, message="no data"))
    assert "\n  and rank 1 ended with exit code 2 (" in judge(tmp_path, ends, is_script=True).text


def test_verdict_when_scripts_left_by_sys_exit_then_the_first_call_counts_and_not_the_first_end(tmp_path):
    second, first = (
        replace(end(rank, 1, noticed), departure=Departure(message=None, user_line=None, time=called))
        for rank, noticed, called in ((0, 3.0, 2.5), (1, 3.1, 2.0))
    )
    assert judge(tmp_path, [second, first], is_script=True).text.startswith("rank 1 ended with exit code 1")
    assert end_from_json(end_to_json(first), "node 1", -0.5).departure.time == 1.5


def test_verdict_when_scripts_left_by_sys_exit_as_one_did_not_answer_then_that_one_is_named(tmp_path):
    departure = Departure(message=None, user_line=LINE, is_consequence=True, has_timed_out=True, time=1.0)
    left, ended = (replace(end(rank, code, 1.0), departure=departure) for rank, code in ((0, 3), (1, KILLED)))
    hung = end(2, KILLED, 2.0, was_stopped=True)
    verdict = judge(tmp_path, [left, replace(ended, was_stopped=True), hung], is_script=True)
    assert verdict.text.startswith("rank 2 did not answer, and the others waited in vain")
    assert "\n  rank 0, 1 ended as a consequence" in verdict.text
    assert verdict.exit_code == 3
    at_once = [replace(left, departure=replace(departure, has_timed_out=False)), hung]
    assert judge(tmp_path, at_once, is_script=True).text.startswith("rank 0 ended with exit code 3")


def test_stop_when_one_rank_alone_had_a_signal_then_it_is_named():
    asked = replace(end(0, 143, 1.0), was_asked_to_stop=True)
    assert how_stopped([asked, end(1, -signal.SIGTERM, 2.0)]) == "rank 1 ended by SIGTERM"
    assert how_stopped([asked, end(1, 130, 2.0)]) == "rank 1 ended with exit code 130, as after SIGINT"
    assert how_stopped([asked, end(1, 0, 2.0)]) == ""


def test_verdict_when_a_rank_still_handles_its_error_then_it_is_named_and_not_the_one_that_lost_it(tmp_path):
    ended = replace(end(1, KILLED, 2.0), was_stopped=True, last_line="train.py:9 in main")
    cleaning = replace(ended, handled="ValueError: no data (train.py:5)")
    text = judge(tmp_path, [end(0, 1, 1.0, **LOST), cleaning], is_script=True).text
    assert text.startswith("rank 1 was still handling ValueError: no data (train.py:5) when the others had lost it")
    assert "\n  train.py:9 in main\n" in text
    assert judge(tmp_path, [end(0, 1, 1.0, **LOST), ended], is_script=True).text.startswith("rank 0 failed")


def test_verdict_when_ranks_report_their_own_errors_then_the_first_to_leave_the_others_comes_first(tmp_path):
    late, early = (end(rank, 1, time, message="bad", left_group_at=time - 0.5) for rank, time in ((0, 3.0), (1, 3.2)))
    left = replace(early, failure=replace(early.failure, left_group_at=2.4, message="cause"))
    text = judge(tmp_path, [late, left]).text
    assert text.startswith("rank 1 failed after step 4: ValueError: cause")
    assert "  and rank 0 failed: ValueError: bad" in text
    assert judge(tmp_path, [end(0, KILLED, 2.9), left]).text.startswith("rank 0 was killed")
    here = end_from_json(end_to_json(left), "node 1", -0.5)
    assert (here.failure.left_group_at, here.left_group_at) == (pytest.approx(1.9), None)


def test_verdict_when_a_rank_was_ended_that_had_left_the_others_then_it_did_not_end_as_a_consequence(tmp_path):
    left = replace(end(1, KILLED, 2.0), was_stopped=True, left_group_at=0.5, last_line="train.py:9 in main")
    text = judge(tmp_path, [end(0, 1, 1.0, **LOST), left], is_script=True).text
    assert text.startswith("rank 1 had left the process group when the others lost it; it was ended\n  train.py:9")
    text = judge(tmp_path, [end(0, 1, 1.0, message="bad", left_group_at=0.6), left], is_script=True).text
    assert text.startswith("rank 0 failed")
    assert "  rank 1 had left the process group before, and was ended at train.py:9 in main" in text
    later = replace(left, left_group_at=1.5)
    assert judge(tmp_path, [end(0, 1, 1.0, **LOST), later], is_script=True).text.startswith("rank 0 failed")


def test_verdict_when_a_rank_failed_while_it_handled_an_error_then_that_is_told_too(tmp_path):
    handled = ("ValueError: no\ndure: data (train.py:5)", "KeyError: 'x' (train.py:4)")
    failed = end(1, 1, message="bad", handled=handled)
    told = (
        "\n  while it handled ValueError: no\n  dure: data (train.py:5)\n  while it handled KeyError: 'x' (train.py:4)"
    )
    assert told in judge(tmp_path, [end(0, 1, **LOST), failed]).text
    assert end_from_json(end_to_json(failed), "node 1", 0.0).failure.handled == handled
    left = replace(end(1, 1), departure=Departure(message=None, user_line=None, handled=handled))
    assert told in judge(tmp_path, [end(0, 1, **LOST), left], is_script=True).text


def test_verdict_when_a_rank_failed_after_it_lost_one_that_said_nothing_then_its_error_is_told(tmp_path):
    failed = end(0, 1, 1.0, is_consequence=True, is_after_loss=True, type="KeyError", message="'val'")
    text = judge(tmp_path, [failed, end(1, 0, 0.5)], is_script=True).text
    assert text.startswith("rank 1 ended with exit code 0, and the others lost it")
    assert "\n  rank 0 failed after it had lost another: KeyError: 'val'" in text
    assert "consequence" not in text
    text = judge(tmp_path, [failed, end(1, 1, 0.5, message="cause")], is_script=True).text
    assert "rank 0 ended as a consequence" in text


def test_end_when_a_peers_failure_is_none_then_it_is_refused():
    sent = end_to_json(end(1, 1, message="seen"))
    assert end_from_json(sent, "node 1", 2.0).failure == failure_of(1, time=2.0, message="seen")
    with pytest.raises(DocumentInvalid, match=r"holds other fields than it should \(failure\.pid"):
        end_from_json({**sent, "failure": {**sent["failure"], "pid": "one"}}, "node 1", 0.0)


def test_ranks_when_all_left_with_0_too_early_then_the_first_is_named():
    assert "rank 1 ended with exit code 0 before" in left_early([end(0, 0, 2.0), end(1, 0, 1.0)]).text


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGRTMIN + 3, "SIGRTMIN+3"), (signal.SIGRTMAX, "SIGRTMAX")],
)
def test_every_signal_has_a_name(number, name):
    assert signal_name(number) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("rank", "first"), ("exit_code", None), ("time", "now"), ("memory_limit_bytes", "many"), ("crash", [{"line": 3}])],
)
def test_end_of_another_node_when_a_field_is_none_of_its_kind_then_it_is_refused(name, value):
    sent = end_to_json(WorkerEnd(rank=1, exit_code=-9, time=1.0, was_stopped=False))
    with pytest.raises(DocumentInvalid, match=rf"holds other fields than it should \({name}"):
        end_from_json({**sent, name: value}, "node 1", 0.0)
