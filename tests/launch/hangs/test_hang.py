"""Blame for a hang, from what each rank was doing."""

import bdb
import json
import signal
import tempfile
import threading
from dataclasses import replace

import pytest

from dure.checked import record_from_json
from dure.failures.frames import OWN_ROOT, Frame
from dure.launch.hangs.diagnosis import explain, verdict_from_json
from dure.launch.hangs.rank_state import Call, Collective, RankState
from dure.launch.worker.stacks import end_frames, parse_stacks

TORCH = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def user(line, function="train"):
    return Frame(file="/home/me/train.py", line=line, function=function)


def call(op="all_reduce", sequence=7, sizes=((4,),), line=10, *, is_pending=True):
    return Collective(
        group="0", sequence=sequence, op=op, sizes=[list(size) for size in sizes], dtypes=["Float"], time=1.0,
        is_pending=is_pending, frames=(Frame(file=TORCH, line=1, function=op), user(line)),
    )  # fmt: skip


def rank(number, *calls, line=20, **fields):
    return RankState(
        **{
            "rank": number, "pid": 100 + number, "step": 5, "phase": "training", "silent_seconds": 12.0,
            "main": (user(line),), "collectives": calls, **fields,
        }
    )  # fmt: skip


def blamed(*states):
    verdict = explain(states, 12.0)
    return verdict.culprits, verdict.text


def test_rank_when_elsewhere_then_is_blamed_with_both_lines():
    culprits, text = blamed(rank(0, call(line=10)), rank(1, call(sequence=6, is_pending=False), line=33))
    assert culprits == (1,)
    first = text.splitlines()[0]
    assert first == (
        "no step has finished for 12.0 s: rank 1 is idle at /home/me/train.py:33 in train, and rank 0 waits for it "
        "in all_reduce #7 of [4] float at /home/me/train.py:10 in train"
    )


@pytest.mark.parametrize(
    ("fields", "words", "is_certain"),
    [
        ({"busy_fraction": 1.0}, "computes", False),
        ({"busy_fraction": 1.0, "collectives": None}, "holds Python's lock", False),
        ({"collectives": None, "main": (), "has_closed_socket": True}, "waits, and has closed the socket", False),
        ({"blocked_fraction": 1.0, "collectives": None}, "waits in the kernel, mostly for a disk", False),
        ({"is_stopped": True}, "`kill -CONT 101` lets it go on", True),
        ({"exit_code": 0}, "has left with exit code 0", True),
        ({"exit_code": -9}, "has left with SIGKILL", True),
        (
            {"main": (Frame(file="/v/torch/utils/data/dataloader.py", line=1, function="_next"), user(33))},
            "waits for data",
            False,
        ),
    ],
)
def test_rank_when_elsewhere_then_is_said_how(fields, words, is_certain):
    verdict = explain([rank(0, call()), rank(1, call(sequence=6, is_pending=False), **fields)], 12.0)
    assert verdict.culprits == (1,)
    assert words in verdict.text.splitlines()[0]
    assert verdict.is_certain is is_certain


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (None, "rank 1 is at its end"),
        ("ValueError: no data (a.py:3)", "rank 1 has failed (ValueError: no data (a.py:3))"),
    ],
)
def test_rank_when_its_threads_keep_it_then_their_line_and_its_own_failure_are_told(failure, words):
    main = Frame(file=threading.__file__, line=1590, function="_shutdown")
    held = {"phase": "leaving", "main": (main,), "others": ((user(44, "beat"),),), "failure": failure}
    text = blamed(rank(0, call()), rank(1, call(sequence=6, is_pending=False), **held))[1]
    assert f"{words}, waiting for threads to end at /home/me/train.py:44 in beat, and rank 0 waits" in text


def test_line_when_its_file_has_a_newline_in_its_name_then_is_one_line():
    text = blamed(rank(0, call()), rank(1, call(sequence=6, is_pending=False), main=(user(3, "a\nfake"),)))[1]
    assert r"in a\x0afake, and rank 0 waits" in text.splitlines()[0]


def test_ranks_when_several_are_at_their_end_then_the_words_are_of_several():
    text = blamed(*(rank(number, phase="leaving") for number in range(2)))[1]
    assert "ranks 0, 1 are at their end, leaving" in text


def test_rank_when_it_handles_an_error_of_its_own_then_that_is_told():
    error = "ValueError: no data (train.py:9)"
    finally_waits = rank(1, call("barrier", line=11), handled=error)
    assert f"\n    rank 1 is handling {error}" in blamed(rank(0, call()), finally_waits)[1]
    assert "is handling" not in blamed(rank(0, call(), handled=error), finally_waits)[1]


def test_ranks_when_in_different_calls_then_both_lines_are_named():
    culprits, text = blamed(rank(0, call("broadcast", line=10)), rank(1, call("all_reduce", line=11)))
    assert culprits == (0, 1)
    assert "ranks do not agree on what comes next" in text
    assert "rank 0 waits in broadcast #7 of [4] float at /home/me/train.py:10" in text
    assert "rank 1 waits in all_reduce #7 of [4] float at /home/me/train.py:11" in text


def test_ranks_when_shapes_differ_then_the_one_that_is_alone_is_blamed_with_both_lines():
    culprits, text = blamed(rank(0, call(line=10)), rank(1, call(sizes=((8,),), line=11)), rank(2, call(line=10)))
    assert culprits == (1,)
    assert text.splitlines()[0] == (
        "no step has finished for 12.0 s: ranks do not agree on what comes next: "
        "rank 1 waits in all_reduce #7 of [8] float at /home/me/train.py:11 in train; "
        "ranks 0, 2 wait in all_reduce #7 of [4] float at /home/me/train.py:10 in train"
    )


def test_ranks_when_types_differ_then_both_lines_are_named():
    double = replace(call(line=11), dtypes=["Double"])
    culprits, text = blamed(rank(0, call(line=10)), rank(1, double))
    assert culprits == (0, 1)
    first = text.splitlines()[0]
    assert "rank 0 waits in all_reduce #7 of [4] float at /home/me/train.py:10 in train; " in first
    assert "rank 1 waits in all_reduce #7 of [4] double at /home/me/train.py:11 in train" in first


def test_ranks_when_one_is_a_call_behind_then_it_is_blamed():
    culprits, text = blamed(rank(0, call()), rank(1, call(sequence=6, line=11)), rank(2, call()))
    assert culprits == (1,)
    assert "ranks wait in different calls: rank 1 waits in all_reduce #6" in text.splitlines()[0]


def test_ranks_when_they_make_the_same_call_from_different_lines_then_none_is_blamed():
    culprits, text = blamed(rank(0, call(line=10)), rank(1, call(line=11)), rank(2, call(line=11)))
    assert culprits == ()
    assert "a link between them is cut or very slow" in text


def test_rank_when_it_cannot_answer_then_its_step_and_collective_are_told_beside_those_of_the_others():
    mute = rank(1, is_stopped=True, main=(), collectives=None, sequence=4)
    culprits, text = blamed(rank(0, call(), sequence=6), mute)
    assert culprits == (1,)
    lines = [line for line in text.splitlines() if line.startswith("  rank ")]
    assert lines[0].endswith("at /home/me/train.py:10 in train, in step 5, after collective #6")
    assert lines[1].endswith("lets it go on, in step 5, after collective #4")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step": 0, "phase": "starting"}, "with no step done"),
        ({"phase": "saving"}, "in step 5 (saving)"),
        ({"phase": "evaluating", "sequence": 9}, "in step 5 (evaluating), after collective #9"),
    ],
)
def test_rank_when_it_cannot_answer_then_its_phase_is_told(fields, words):
    _, text = blamed(rank(0, call()), rank(1, is_stopped=True, main=(), collectives=None, **fields))
    assert text.splitlines()[-1].endswith(f"lets it go on, {words}")


def test_rank_when_it_waits_in_a_debugger_then_that_is_said():
    prompt = Frame(file=bdb.__file__, line=1, function="dispatch_line")
    culprits, text = blamed(rank(0, call()), rank(1, main=(prompt, user(33))))
    assert culprits == (1,)
    assert "rank 1 waits in a debugger at /home/me/train.py:33" in text.splitlines()[0]


def test_ranks_when_all_wait_in_one_call_then_the_link_is_suspected():
    culprits, text = blamed(rank(0, call()), rank(1, call()))
    assert culprits == ()
    assert "a link between them is cut or very slow" in text


def test_ranks_when_many_wait_then_stand_on_one_line():
    _, text = blamed(*(rank(number, call()) for number in range(20)), rank(20, call(sequence=6, is_pending=False)))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more wait" in text.splitlines()[0]
    assert len(text.splitlines()) <= 5


def test_wait_when_through_shared_memory_then_is_known_by_the_frames_of_its_thread():
    inside = Frame(file=f"{OWN_ROOT}comm/dure_shm/tensors.py", line=5, function="all_reduce")
    waits = rank(0, others=((Frame(file="x", line=1, function="wait"), inside),))
    culprits, text = blamed(waits, rank(1, line=33))
    assert culprits == (1,)
    assert "rank 0 waits for it in all_reduce" in text


@pytest.mark.parametrize("module", ["groups.py", "meeting.py", "shared_memory/memory.py", "algorithms/wire.py"])
def test_wait_when_a_rank_is_inside_a_module_of_comm_then_is_known_by_its_folder(module):
    inside = Frame(file=f"{OWN_ROOT}comm/{module}", line=5, function="barrier")
    culprits, text = blamed(rank(0, main=(inside, user(7))), rank(1, line=33))
    assert culprits == (1,)
    assert "rank 0 waits for it in barrier" in text


def test_rank_when_no_frame_is_the_users_then_no_line_is_made_up():
    ours = (Frame(file=f"{OWN_ROOT}training/loop.py", line=5, function="_launch"),)
    _, text = blamed(rank(0, main=ours, busy_fraction=1.0))
    assert text.splitlines()[1] == "  rank 0 computes, in step 5"


def test_verdict_when_written_down_then_is_read_as_it_was():
    verdict = explain([rank(0, call()), rank(1, collectives=None)], 12.0)
    assert verdict_from_json(json.loads(json.dumps(verdict.to_json()))) == verdict
    assert record_from_json(RankState, json.loads(json.dumps(verdict.states[0].to_json()))) == verdict.states[0]


def test_stacks_when_parsed_then_the_main_thread_is_known_and_the_launcher_left_out():
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "/a b/queue.py", line 3 in get\n\n'
        "Current thread 0x00007f02 [python] (most recent call first):\n"
        '  File "/home/me/train.py", line 33 in train\n'
        f'  File "{OWN_ROOT}launch/worker/child.py", line 9 in run_in_child\n'
    )
    main, others = parse_stacks("main thread 0x7f02\n", text)
    assert main == (user(33),)
    assert others == ((Frame(file="/a b/queue.py", line=3, function="get"),),)


@pytest.mark.parametrize(("word", "crashed"), [("Current thread", True), ("Thread", False)])
def test_crash_when_a_thread_of_python_had_it_then_its_line_is_known_and_not_the_main_threads(word, crashed):
    text = (
        "main thread 0x7f02\nFatal Python error: Aborted\n\n"
        f'{word} 0x00007f01 (most recent call first):\n  File "/home/me/train.py", line 5 in work\n\n'
        'Thread 0x00007f02 (most recent call first):\n  File "/home/me/train.py", line 33 in train\n'
    )
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        (frame,), is_at_crash = end_frames(file.fileno(), signal.SIGABRT)
    assert (frame.line, is_at_crash) == ((5, True) if crashed else (33, False))


def test_end_by_a_timers_signal_when_stacks_were_written_before_then_only_the_last_own_one_is_its_line():
    dumps = [
        'main thread 0x7f02\nCurrent thread 0x00007f02 (most recent call first):\n  File "/a.py", line 4 in wait\n',
        'Stack (most recent call first):\n  File "/a.py", line 5 in work\n',
        'Stack (most recent call first):\n  File "/a.py", line 6 in work\n',
    ]
    lines = []
    for number in (1, 3):
        with tempfile.TemporaryFile() as file:
            file.write("".join(dumps[:number]).encode())
            file.flush()
            lines.append([frame.line for frame in end_frames(file.fileno(), signal.SIGALRM)[0]])
    assert lines == [[], [6]]


def inside(op, peer=None, role=None, **fields):
    return Call(
        **{"op": op, "group": "0", "role": role, "peer": peer, "tag": 0, "sizes": [[3]], "is_main": True, **fields}
    )


def recv(peer, **fields):
    return inside("recv", peer, "src", **fields)


def send(peer, **fields):
    return inside("send", peer, "dst", **fields)


def first_line(*states):
    return explain(states, 12.0).text.splitlines()[0]


def test_ranks_when_all_receive_in_a_ring_then_each_peer_is_named_and_no_link():
    verdict = explain([rank(number, call=recv((number + 1) % 3)) for number in range(3)], 12.0)
    assert verdict.culprits == (0, 1, 2)
    assert verdict.is_certain
    assert "wait for each other in recv, and none does the other part" in verdict.text
    assert "rank 2 waits in recv of [3] from rank 0" in verdict.text
    assert "link" not in verdict.text


def test_ranks_when_they_name_other_sources_then_both_are_told():
    states = [rank(number, call(op="broadcast"), call=inside("broadcast", number, "src")) for number in range(2)]
    assert "ranks do not agree on src: rank 0 waits in broadcast #7 of [4] float with src=0" in first_line(*states)


def test_ranks_when_tags_differ_then_they_do_not_fit():
    text = first_line(rank(0, call=send(1, tag=1)), rank(1, call=recv(0, tag=2)))
    assert "sends and receives do not fit each other" in text
    assert "with tag 1" in text
    assert "with tag 2" in text


def test_ranks_when_send_meets_recv_then_the_link_is_suspected():
    verdict = explain([rank(0, call=send(1)), rank(1, call=recv(0))], 12.0)
    assert "a link between them is cut or very slow" in verdict.text
    assert verdict.culprits == ()
    assert not verdict.is_certain


def test_rank_when_others_wait_for_it_through_others_then_is_blamed():
    verdict = explain([rank(0, call=recv(1)), rank(1, call=recv(2)), rank(2, line=33)], 12.0)
    assert verdict.culprits == (2,)
    assert "rank 2 is idle at /home/me/train.py:33" in verdict.text


def test_rank_when_nobody_waits_for_it_then_is_not_blamed():
    verdict = explain([rank(0, call=recv(1)), rank(1, call=recv(0)), rank(2, busy_fraction=1.0)], 12.0)
    assert verdict.culprits == (0, 1)


def test_ranks_when_a_circle_may_be_opened_by_a_thread_then_nothing_is_certain():
    ranks = [rank(0, call=recv(1), others=((user(50, "sender"),),)), rank(1, call=recv(0))]
    assert not explain(ranks, 12.0).is_certain


def test_ranks_when_what_they_wait_in_is_not_recorded_then_no_cause_is_told():
    verdict = explain([rank(number, call=inside("irecv")) for number in range(2)], 12.0)
    assert verdict.culprits == ()
    assert first_line(*verdict.states).endswith("ranks 0, 1 wait in irecv of [3] at /home/me/train.py:20 in train")


def test_ranks_when_two_groups_are_called_in_another_order_then_both_groups_are_named():
    groups = {"0": [0, 1, 2], "1": [0, 1], "2": [0, 1]}
    calls = [replace(call(sequence=1), group=name) for name in ("1", "2")]
    states = [rank(number, calls[number], groups=groups) for number in range(2)]
    verdict = explain([*states, rank(2, call(op="barrier", sequence=1), groups=groups)], 12.0)
    assert verdict.culprits == (0, 1)
    assert "rank 0 waits in all_reduce #1 of [4] float in group 1 (ranks 0, 1)" in verdict.text
    assert "rank 1 waits in all_reduce #1 of [4] float in group 2 (ranks 0, 1)" in verdict.text


def test_rank_when_it_works_while_a_collective_of_its_own_is_under_way_then_is_blamed():
    works = rank(1, call(), busy_fraction=1.0, line=33)
    verdict = explain([rank(0, call=recv(1)), works], 12.0)
    assert verdict.culprits == (1,)
    assert "rank 1 computes while all_reduce #7 of [4] float has not finished" in verdict.text


def test_rank_when_it_sleeps_in_native_code_then_the_line_that_called_it_is_told():
    library = Frame(file="/v/lib/python3.11/site-packages/torch/serialization.py", line=5, function="load")
    ours = Frame(file=f"{OWN_ROOT}training/loop.py", line=5, function="_launch")
    text = first_line(rank(0, call()), rank(1, collectives=None, main=(library, ours)))
    assert "rank 1 waits in native code with Python's lock held at /v/lib" in text


def test_ranks_when_they_wait_for_a_gpu_then_are_not_said_to_compute():
    waits = rank(0, call(), busy_fraction=1.0, called="item")
    culprits, text = blamed(waits, rank(1, line=33))
    assert culprits == (1,)
    assert "rank 0 waits for it in all_reduce #7" in text


def test_ranks_when_nccl_records_a_ring_of_recv_then_peers_are_told():
    calls = [call(op="recv 0<-1", sequence=1), call(op="recv 1<-0", sequence=1)]
    verdict = explain(
        [rank(number, calls[number], groups={"0": [0, 1]}, called="synchronize") for number in (0, 1)], 12.0
    )
    assert verdict.culprits == (0, 1)
    assert "rank 0 waits in recv of [4] from rank 1" in verdict.text


@pytest.mark.parametrize(
    ("later", "has_moved"), [({}, False), ({"calls": 8}, True), ({"line": 21}, True), ({"step": 6}, True)]
)
def test_verdict_when_a_rank_gets_on_meanwhile_then_is_none(later, has_moved):
    verdict = explain([rank(0, call=recv(1), calls=7), rank(1, call=recv(0), calls=7)], 12.0)
    after = [rank(0, call=recv(1), calls=7), rank(1, call=recv(0), **{"calls": 7, **later})]
    assert verdict.has_moved(after) is has_moved


def test_rank_when_it_runs_a_function_that_another_called_then_it_alone_is_blamed():
    rpc = TORCH.replace("distributed_c10d.py", "rpc/{}.py")
    api, internal = (Frame(file=rpc.format(name), line=1, function=name) for name in ("api", "internal"))
    served = (user(40, "served"), internal)
    states = [
        rank(0, main=(replace(api, function="rpc_sync"), user(10))),
        rank(1, main=(user(20),), others=(served,)),
        rank(2, main=(user(20),)),
    ]
    verdict = explain(states, 12.0)
    assert verdict.culprits == (1,)
    assert not verdict.is_certain
    assert verdict.text.splitlines()[0].endswith(
        "rank 1 runs a function that another rank called at /home/me/train.py:40 in served, and rank 0 waits for it in "
        "rpc_sync at /home/me/train.py:10 in train"
    )
