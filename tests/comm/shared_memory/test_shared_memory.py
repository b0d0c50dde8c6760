"""The memory of one host: its barrier, its errors, and the reductions through it. Threads stand for the ranks."""

import os
import threading
import time
from functools import reduce

import pytest
import torch

from dure.comm.algorithms import shm
from dure.comm.dure_shm import collectives as shm_collectives
from dure.comm.shared_memory import memory as shared_memory
from dure.comm.shared_memory.call_number import call_number, describe
from dure.comm.shared_memory.memory import Peer, SharedMemory, open_shared_memory, start_time_of
from dure.errors import EnvironmentLacks, PeerLost, RanksDisagree
from dure.failures.report import is_peer_lost
from tests.comm.shared_memory.memory_threads import SLOT_BYTES, in_threads

RANKS = [1, 2, 3, 4]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
COMBINE = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


def sizes_for(num_ranks):
    """Nothing, less than one element each, about one each, and from less than one round to several."""
    slot_elements = SLOT_BYTES * num_ranks // 4
    return sorted({0, 1, num_ranks - 1, num_ranks + 1, 100, slot_elements, 3 * slot_elements + 7, 5 * slot_elements})


# -- the barrier


@pytest.mark.parametrize("num_ranks", RANKS)
def test_meet_when_called_again_and_again_then_nobody_passes_before_all_came(num_ranks):
    reached = [0] * num_ranks
    lagging = []

    def work(memory):
        for turn in range(1, 300):
            reached[memory.rank] = turn
            memory.meet()
            lagging.extend(turn - other for other in reached if other < turn)

    in_threads(num_ranks, work)
    assert reached == [299] * num_ranks
    assert lagging == []


def test_meet_when_a_rank_is_slow_then_the_sleepers_are_woken(monkeypatch):
    monkeypatch.setattr(shared_memory, "_SLICE_SECONDS", 60.0)  # who is not woken sleeps on

    def work(memory):
        if memory.rank == 0:
            time.sleep(0.2)
        memory.meet()

    start = time.monotonic()
    assert in_threads(3, work) == [None] * 3
    assert time.monotonic() - start < 30.0


def test_meet_when_a_rank_does_not_come_then_the_others_name_it():
    errors = in_threads(3, lambda memory: memory.meet() if memory.rank != 1 else None, timeout_seconds=0.2)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLost)
        assert is_peer_lost(error)
        assert str(error).startswith("rank 1 did not come within 0.2 s while rank ")
        assert str(error).endswith(" (Timed out: the timeout is over)")
        assert isinstance(error, RuntimeError)


def test_meet_when_a_rank_has_left_then_the_others_say_so_at_once():
    start = time.monotonic()
    error, _ = in_threads(2, lambda memory: memory.meet() if memory.rank == 0 else memory.close())
    assert isinstance(error, PeerLost)
    assert "rank 1 left the group while rank 0 waited in barrier" in str(error)
    assert time.monotonic() - start < 5.0


def test_meet_when_a_rank_came_and_then_left_then_it_counts():
    def work(memory):
        if memory.rank == 0:
            time.sleep(0.2)
        memory.meet()
        memory.close()

    assert in_threads(2, work) == [None, None]


def test_meet_when_ranks_are_in_different_calls_then_each_names_both():
    calls = [call_number("all_reduce", 80, dtype=torch.float32), call_number("broadcast", 40, root=1)]
    errors = in_threads(2, lambda memory: memory.meet(calls[memory.rank]))
    assert [type(error) for error in errors] == [RanksDisagree] * 2
    assert str(errors[0]).startswith("rank 1 called broadcast from rank 1 of 40 bytes where rank 0 called all_reduce")
    assert "all_reduce(sum) of 80 bytes float32 where rank 1 called" in str(errors[1])


def test_meet_after_a_failure_then_no_further_call_is_made():
    def work(memory):
        if memory.rank == 1:
            return time.sleep(0.5)
        with pytest.raises(PeerLost, match="did not come"):
            memory.meet()
        with pytest.raises(PeerLost, match="an earlier call of this group failed"):
            memory.meet()
        return None

    assert in_threads(2, work, timeout_seconds=0.1) == [None, None]


def test_meet_when_a_process_has_ended_then_it_is_named_although_it_is_not_yet_reaped():
    pid = os.fork()
    if pid == 0:
        time.sleep(0.2)
        os._exit(0)
    start = time.monotonic()
    error, _ = in_threads(2, lambda memory: memory.meet() if memory.rank == 0 else None, processes=[os.getpid(), pid])
    os.waitpid(pid, 0)
    assert isinstance(error, PeerLost)
    assert f"rank 1 (process {pid}) ended while rank 0 waited" in str(error)
    assert time.monotonic() - start < 5.0


def test_peer_when_its_number_was_given_to_another_process_then_it_has_ended():
    peer = Peer(os.getpid(), start_time_of(os.getpid()) - 1)
    assert peer.has_ended()


def test_peer_without_pidfd_then_its_start_time_tells(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", lambda pid: (_ for _ in ()).throw(OSError("no such call")))
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
    peer = Peer(pid, start_time_of(pid))
    assert not peer.has_ended()
    os.kill(pid, 9)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert peer.has_ended()
    os.waitpid(pid, 0)


def test_interrupt_when_a_thread_waits_then_its_call_fails():
    def work(memory):
        if memory.rank == 1:
            return None
        threading.Timer(0.1, memory.interrupt).start()
        return memory.meet()

    error = in_threads(2, work)[0]
    assert isinstance(error, PeerLost)
    assert "the group was destroyed while rank 0 waited" in str(error)


def test_meet_without_futex_then_it_polls(monkeypatch):
    monkeypatch.setattr(shared_memory.futex, "_call", None)
    monkeypatch.setattr(shared_memory.futex, "_keeps_order", False)

    def work(memory):
        for _ in range(20):
            time.sleep(0.002 * memory.rank)
            memory.meet()

    assert in_threads(2, work) == [None, None]


def test_memory_when_a_forked_child_uses_it_then_it_is_refused():
    def work(memory):
        memory._pid = os.getpid() + 1  # as in a child
        memory.leave()
        memory.meet()

    answers = in_threads(1, work)
    assert isinstance(answers[0], RuntimeError)
    assert "but a child forked from it used it" in str(answers[0])


# -- opening


def open_in_threads(num_ranks, spoil=lambda rank, said: None):
    """Open one real memory by threads; `spoil` changes what a rank hears of the others' first words."""
    said, meeting = {}, threading.Barrier(num_ranks)
    answers = [None] * num_ranks

    def run(rank):
        turn = iter(range(2))

        def exchange(numbers):
            number = next(turn)
            said[number, rank] = numbers
            meeting.wait()
            heard = [list(said[number, other]) for other in range(num_ranks)]
            if number == 0:
                spoil(rank, heard)
            return heard

        try:
            answers[rank] = open_shared_memory(
                exchange, rank=rank, world_size=num_ranks, slot_bytes=4096, timeout_seconds=5.0
            )
        except Exception as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_open_then_all_ranks_have_one_memory_without_a_name():
    before = set(os.listdir("/dev/shm"))
    num_fds = len(os.listdir("/proc/self/fd"))
    memories = open_in_threads(3)
    assert all(isinstance(memory, SharedMemory) for memory in memories)
    memories[2].view(1, 0, 0, 4, torch.float32).fill_(7.0)
    assert memories[0].view(1, 0, 0, 4, torch.float32).tolist() == [7.0] * 4
    assert set(os.listdir("/dev/shm")) == before
    for memory in memories:
        memory.close()
    del memories, memory
    assert len(os.listdir("/proc/self/fd")) == num_fds


@pytest.mark.parametrize("what", ["descriptor", "process", "token", "no memfd"])
def test_open_when_one_rank_cannot_reach_it_then_all_ranks_say_which(what, tmp_path, monkeypatch):
    stranger = os.open(tmp_path, os.O_RDONLY)

    def spoil(rank, heard):
        if rank == 1 or what == "no memfd":
            place, value = {
                "descriptor": (2, stranger), "process": (0, 2**22 + 1), "token": (3, 1), "no memfd": (2, -1),
            }[what]  # fmt: skip
            heard[0][place] = value

    answers = open_in_threads(3, spoil)
    os.close(stranger)
    lacking = "ranks 0, 1, 2" if what == "no memfd" else "rank 1"
    for answer in answers:
        assert isinstance(answer, EnvironmentLacks)
        assert str(answer).startswith(f"{lacking} cannot open the memory of rank 0, but shm needs all ranks in one")


# -- reductions


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "product"])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("whole_bytes", [-1, 600, 2**20], ids=["by shares", "both", "whole"])
def test_all_reduce_then_it_is_the_reduction_in_the_order_of_the_ranks(num_ranks, op, whole_bytes, monkeypatch):
    monkeypatch.setattr(shm, "WHOLE_BYTES", whole_bytes)

    def work(memory):
        draw = torch.Generator().manual_seed(0)
        wrong = []
        for dtype in DTYPES:
            for size in sizes_for(num_ranks):
                vectors = [torch.randn(size, generator=draw).mul(10).to(dtype) for _ in range(num_ranks)]
                expected = reduce(COMBINE[op], vectors)
                if op == "mean" and num_ranks > 1:
                    expected = expected / num_ranks if dtype.is_floating_point else expected.div(
                        num_ranks, rounding_mode="trunc"
                    )  # fmt: skip
                mine = vectors[memory.rank].clone()
                before = memory.written_bytes
                shm.all_reduce(memory, mine, op)
                written = memory.written_bytes - before
                formula = shm.sent_elements(size, num_ranks)[memory.rank] * dtype.itemsize
                if not torch.equal(mine, expected) or written != formula:
                    wrong.append((dtype, size, written, formula))
        return wrong

    assert in_threads(num_ranks, work) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_collectives_then_they_move_what_they_should(num_ranks):
    def work(memory):
        wrong = []
        for size in sizes_for(num_ranks):
            vectors = [torch.arange(size, dtype=torch.float32) + rank for rank in range(num_ranks)]
            own = vectors[memory.rank]
            gathered = [torch.empty(size) for _ in vectors]
            shm_collectives.all_gather(memory, own, gathered)
            wrong += [("all_gather", size)] * (not torch.equal(torch.stack(gathered), torch.stack(vectors)))
            for root in range(num_ranks):
                sent = own.clone()
                shm_collectives.broadcast(memory, sent, root)
                wrong += [("broadcast", size, root)] * (not torch.equal(sent, vectors[root]))
            shares = [own * (rank + 1) for rank in range(num_ranks)]
            reduced = shares[memory.rank]  # in place
            expected = sum((memory.rank + 1) * vector for vector in vectors)
            shm_collectives.reduce_scatter(memory, shares, reduced, "sum")
            wrong += [("reduce_scatter", size)] * (not torch.equal(reduced, expected))
            shm_collectives.barrier(memory)
        return wrong

    assert in_threads(num_ranks, work) == [[]] * num_ranks


def test_slots_when_ranks_are_many_then_the_segment_does_not_grow_without_bound():
    for num_ranks in (1, 2, 4, 8, 16, 64):
        slot_bytes = shm.slot_bytes_for(num_ranks)
        assert slot_bytes % (64 * num_ranks) == 0
        assert shared_memory.shared_bytes(num_ranks, slot_bytes) <= max(13 * 2**20, 3 * 4096 * (num_ranks + 1) ** 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (call_number("barrier"), "barrier"),
        (call_number("all_reduce", 8, op="max", dtype=torch.float64), "all_reduce(max) of 8 bytes float64"),
        (call_number("broadcast", 3 * 2**30, root=17), "broadcast from rank 17 of 3221225472 bytes"),
        (call_number("all_gather", 0), "all_gather of 0 bytes"),
        (call_number("reduce_scatter", 2, op="bxor", dtype=torch.int16), "reduce_scatter(bxor) of 2 bytes int16"),
    ],
)
def test_describe_then_it_says_what_the_number_was_made_of(call, words):
    assert 0 <= call < 2**64
    assert describe(call) == words
