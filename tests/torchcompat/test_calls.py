"""Calls of `torch.distributed`, made, failed and under way."""

import importlib
import io
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dure.comm.groups import ProcessGroup
from dure.torchcompat.calls import (
    SequenceNumber,
    _PlainData,
    call_under_way,
    calls_made,
    flight_record,
    group_members,
    name_called,
)
from tests.comm.gloo_ranks import on_ranks


def test_sequence_number_when_there_is_no_group_then_is_unknown() -> None:
    assert SequenceNumber().now() == -1


def test_sequence_number_when_groups_come_and_go_then_is_that_of_the_last_collective() -> None:
    sequence = SequenceNumber()
    for backend in ("gloo", "cpu:gloo"):  # of which torch itself asks only the first
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        assert sequence.now() == 0
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        assert sequence.now() == 2
        dist.destroy_process_group()
        assert sequence.now() == -1


def test_flight_record_then_names_calls_and_lines(solo_group: None) -> None:
    dist.all_reduce(torch.ones(3))
    deadline = time.monotonic() + 10  # on a busy machine it is noted after the call has come back
    while (last := flight_record()[-1])["is_pending"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (last["op"], last["sizes"], last["dtypes"], last["is_pending"]) == ("all_reduce", [[3]], ["Float"], False)
    assert [__file__, "test_flight_record_then_names_calls_and_lines"] in [
        [file, function] for file, _, function in last["frames"]
    ]


def test_flight_record_of_nccl_when_batched_messages_are_never_retired_then_only_the_last_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(op: str, retired: bool, group: str = "0", state: str = "scheduled") -> dict[str, object]:
        is_p2p = op in ("send", "recv")
        return {
            "process_group": (group, ""), "p2p_seq_id": 0, "collective_seq_id": 0, "is_p2p": is_p2p, "state": state,
            "profiling_name": f"nccl:{op}", "input_sizes": [], "input_dtypes": [], "time_created_ns": 0,
            "retired": retired, "frames": [],
        }  # fmt: skip

    entries = [
        entry("send", False), entry("recv", False), entry("all_reduce", True),  # ended, as what came after them did
        entry("send", False, "1"), entry("recv", False, "1"),
        entry("all_reduce", False), entry("send", False),
    ]  # fmt: skip
    module = importlib.import_module("torch._C._distributed_c10d")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(module, "_dump_nccl_trace", lambda: pickle.dumps({"entries": entries}), raising=False)
    assert [call["is_pending"] for call in flight_record()] == [
        False,
        False,
        False,
        False,
        True,
        True,
        True,
    ]


def test_flight_record_when_there_is_no_group_then_is_empty() -> None:
    assert flight_record() == []


def seen_while(call: Callable[[], object]) -> dict[str, Any] | None:
    """Say what another thread is in that makes a call, once it is in one."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    seen = None
    while seen is None and time.monotonic() < deadline:
        time.sleep(0.01)
        seen = call_under_way(sys._current_frames()[thread.ident])
    dist.send(torch.ones(1), 0)  # rank 0 may go on
    thread.join(10)
    return seen


@pytest.mark.parametrize(
    ("call", "answer", "expected"),
    [
        (
            lambda: dist.recv(torch.ones(2, 3), src=0, tag=5),
            lambda: dist.send(torch.ones(2, 3), 1, tag=5),
            {"op": "recv", "role": "src", "peer": 0, "tag": 5, "sizes": [[2, 3]]},
        ),
        (
            lambda: dist.broadcast(torch.ones(4), group_src=0),
            lambda: dist.broadcast(torch.ones(4), 0),
            {"op": "broadcast", "role": "src", "peer": 0, "tag": 0, "sizes": [[4]]},
        ),
        (dist.barrier, dist.barrier, {"op": "barrier", "role": None, "peer": None, "tag": 0, "sizes": []}),
    ],
)
def test_call_under_way_then_its_arguments_are_read_from_the_frames(call, answer, expected) -> None:
    def work(group: ProcessGroup) -> object:
        if group.rank == 1:
            return seen_while(call)
        dist.recv(torch.ones(1), 1)
        answer()
        return group_members()

    (members, seen) = on_ranks(2, work)
    assert members[seen.pop("group")] == [0, 1]
    assert seen == expected


def test_call_under_way_when_a_transfer_is_waited_for_then_is_that() -> None:
    def wait() -> None:
        work = dist.irecv(torch.ones(2), 0, tag=5)
        work.wait()

    def work(group: ProcessGroup) -> object:
        if group.rank == 1:
            return seen_while(wait)
        dist.recv(torch.ones(1), 1)
        return dist.send(torch.ones(2), 1, tag=5)

    seen = on_ranks(2, work)[1]
    assert (seen["op"], seen["role"]) == ("irecv", None)


def test_call_under_way_when_there_is_none_then_is_none() -> None:
    assert call_under_way(sys._getframe()) is None


def test_calls_made_then_counts_all_groups(solo_group: None) -> None:
    before = calls_made()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), group=dist.new_group([0]))
    assert calls_made() >= before + 2


def test_calls_made_when_there_is_no_group_then_is_not_known() -> None:
    assert calls_made() == -1
    assert group_members() == {}


def test_name_called_then_is_what_a_frame_waits_for() -> None:
    thread = threading.Thread(target=lambda: os.read(read, 1), daemon=True)
    read, write = os.pipe()
    thread.start()
    time.sleep(0.05)
    name = name_called(sys._current_frames()[thread.ident])
    os.write(write, b"x")
    thread.join()
    os.close(read)
    os.close(write)
    assert name == "read"


def test_plain_data_when_it_names_a_function_then_nothing_runs(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "made"),)

    with pytest.raises(pickle.UnpicklingError, match="is no plain data"):
        _PlainData(io.BytesIO(pickle.dumps([Runs()]))).load()
    assert not (tmp_path / "made").exists()
