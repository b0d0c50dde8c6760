"""A checkpoint that is written while its tensors change again: what is in it, and what each rank learns of failures."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dure.comm.groups import Solo
from dure.errors import CheckpointNotWritten, DiskFull, PeerLost, StateChanged
from dure.training.checkpoints import staging
from dure.training.checkpoints.async_save import AsyncSave
from dure.training.checkpoints.rank_shard import RankShard
from dure.training.checkpoints.reader import Checkpoint, verify
from dure.training.checkpoints.staging import StagingBuffer
from dure.training.checkpoints.store import CheckpointStore
from tests.commands import wait_until
from tests.training.checkpoints.checkpoint_cases import (
    ThreadGroup,
    ThreadRank,
    at,
    new_store,
    save,
    snapshot_of,
    train,
    trained,
)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("dure-checkpoint")]


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold back every file until the event is set."""
    may_write, write = threading.Event(), RankShard.write

    def waiting(self: RankShard, directory: Path, between: Callable[[], None]) -> Any:
        assert may_write.wait(20)
        return write(self, directory, between)

    monkeypatch.setattr(RankShard, "write", waiting)
    return may_write


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    write = RankShard.write

    def fails(self: RankShard, directory: Path, between: Callable[[], None]) -> Any:
        if self.rank == 1:
            raise error
        return write(self, directory, between)

    monkeypatch.setattr(RankShard, "write", fails)


def begin(store: CheckpointStore, group: Any, samples: int = 8, **settings: Any) -> AsyncSave:
    pending = AsyncSave(store, at(samples), group, **settings)
    pending.begin(snapshot_of(*trained(), group.rank), group, StagingBuffer(2))
    pending.start()
    return pending


def leftovers(root: Path) -> list[Path]:
    return list(root.glob(".*"))


def test_checkpoint_when_training_goes_on_beside_it_holds_the_state_it_began_with(tmp_path, slow_disk):
    store, _ = new_store(tmp_path)
    model, optimizer = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {name: value.clone() for name, value in optimizer.state[model.norm.weight].items()}
    pending = AsyncSave(store, at(8), Solo()).begin(snapshot_of(model, optimizer), Solo(), StagingBuffer(2))
    pending.start()
    train(model, optimizer, 5, seed=1)
    slow_disk.set()
    saved = pending.settle(Solo())
    checkpoint = Checkpoint.read(saved.path)
    assert all(torch.equal(value, before[name]) for name, value in checkpoint.weights().items())
    assert torch.equal(checkpoint.optimizer["state"]["norm.weight"]["exp_avg"], state["exp_avg"])


def test_checkpoint_when_written_beside_training_has_the_very_files_of_one_that_is_waited_for(tmp_path):
    begin(new_store(tmp_path / "beside")[0], Solo()).settle(Solo())
    waited = save(new_store(tmp_path / "waited")[0], snapshot_of(*trained()), at(8), Solo())
    assert verify(tmp_path / "beside" / waited.path.name).files == verify(waited.path).files


def test_checkpoint_when_all_threads_are_done_is_there_before_the_ranks_meet_again(tmp_path):
    meeting = threading.Barrier(3)

    def work(group: ThreadRank) -> Any:
        pending = begin(new_store(tmp_path)[0], group)
        wait_until((tmp_path / "samples-000000000008").exists, "the checkpoint", 10)
        meeting.wait()
        return pending.settle(group)

    answers = ThreadGroup(3).run(work)
    assert {answer.path for answer in answers} == {tmp_path / "samples-000000000008"}
    assert verify(answers[0].path).world_size == 3
    assert answers[0].num_bytes == sum(entry.num_bytes for entry in verify(answers[0].path).files.values())
    assert leftovers(tmp_path) == leftovers(answers[0].path) == []


def begin_beside(root: Path, group: Any, model: Any, optimizer: Any) -> AsyncSave:
    copies = StagingBuffer(2)
    copies.is_beside = True
    steady = frozenset(name for name, _ in model.named_parameters())
    snapshot = replace(snapshot_of(model, optimizer, group.rank), steady=steady)
    pending = AsyncSave(new_store(root)[0], at(8), group).begin(snapshot, group, copies)
    pending.start()
    return pending


def test_checkpoint_when_copied_beside_training_has_the_very_files_of_one_that_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_SMALL_BYTES", 1)
    model, optimizer = trained()
    pending = begin_beside(tmp_path / "beside", Solo(), model, optimizer)
    pending.complete_copy()
    train(model, optimizer, 2, seed=1)
    saved = pending.settle(Solo())
    assert saved.beside_bytes > 0
    waited = save(new_store(tmp_path / "waited")[0], snapshot_of(*trained()), at(8), Solo())
    assert verify(saved.path).files == verify(waited.path).files


def test_checkpoint_when_what_it_copies_changes_on_one_rank_is_left_out_on_all(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_SMALL_BYTES", 1)

    def work(group: ThreadRank) -> bool:
        model, optimizer = trained()
        pending = begin_beside(tmp_path, group, model, optimizer)
        if group.rank == 0:
            train(model, optimizer, 1)
        pending.complete_copy()
        assert pending.has_failed or group.rank
        pending.settle(group)
        return True

    answers = ThreadGroup(2).run(work)
    assert [type(answer) for answer in answers] == [StateChanged] * 2
    assert "at 8 samples was copied beside it, so it is left out" in str(answers[1])
    assert list(tmp_path.iterdir()) == []


def test_stall_when_nobody_waits_is_the_copy_and_else_the_waiting_too(tmp_path, slow_disk):
    pending = begin(new_store(tmp_path)[0], Solo())
    threading.Timer(0.2, slow_disk.set).start()
    saved = pending.settle(Solo())
    assert 0.1 < saved.stall_seconds < saved.write_seconds + 0.2
    beside = begin(new_store(tmp_path)[0], Solo(), 16)
    wait_until((tmp_path / "samples-000000000016").exists, "the checkpoint", 10)
    assert beside.settle(Solo()).stall_seconds < 0.1


@pytest.mark.parametrize(
    ("error", "kinds", "said"),
    [
        (OSError(5, "Input/output error"), [PeerLost, CheckpointNotWritten, PeerLost], "rank 1 could not write its"),
        (OSError(28, "No space left on device"), [DiskFull] * 3, r"a checkpoint needs .* free\)"),
    ],
    ids=["error", "full"],
)
def test_failure_in_one_ranks_thread_when_all_meet_is_raised_on_all(tmp_path, monkeypatch, error, kinds, said):
    failing(monkeypatch, error)

    def work(group: ThreadRank) -> bool:
        pending = begin(new_store(tmp_path)[0], group)
        wait_until(lambda: not pending.is_busy, "the threads", 10)
        if group.rank < 2:  # whose thread failed, and who was to bring all together: both ask to meet
            assert pending.has_failed
        pending.settle(group)
        return True

    answers = ThreadGroup(3).run(work)
    assert [type(answer) for answer in answers] == kinds
    with pytest.raises(kinds[0], match=said):
        raise answers[0]
    assert list(tmp_path.iterdir()) == []


def test_rank_when_lost_with_its_part_leaves_no_checkpoint_and_nobody_waits_for_it(tmp_path):
    pendings: list[AsyncSave] = [None] * 3

    def start(group: ThreadRank) -> None:
        pendings[group.rank] = AsyncSave(new_store(tmp_path)[0], at(8), group).begin(
            snapshot_of(*trained(), group.rank), group, StagingBuffer(2)
        )
        if group.rank < 2:
            pendings[group.rank].start()

    assert ThreadGroup(3).run(start) == [None] * 3
    assert ThreadGroup(2).run(lambda group: pendings[group.rank].settle(group)) == [None] * 2
    assert list(tmp_path.iterdir()) == []


def test_ranks_when_they_fail_while_a_checkpoint_is_written_complete_it_first(tmp_path, slow_disk):
    def work(group: ThreadRank) -> bool:
        pending = begin(new_store(tmp_path)[0], group)
        if group.rank == 0:
            slow_disk.set()
        pending.leave(is_hurried=False)
        return (tmp_path / "samples-000000000008").exists()

    assert ThreadGroup(3).run(work) == [True] * 3
    assert leftovers(tmp_path) == []


def test_rank_when_in_a_hurry_leaves_nothing_behind(tmp_path, slow_disk):
    pending = begin(new_store(tmp_path)[0], Solo())
    threading.Timer(0.05, slow_disk.set).start()
    pending.leave(is_hurried=True)
    assert list(tmp_path.iterdir()) == []


def test_copy_when_memory_is_short_is_not_made(tmp_path, monkeypatch):
    free = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    pending = AsyncSave(new_store(tmp_path)[0], at(8), Solo()).begin(snapshot_of(*trained()), Solo(), StagingBuffer(2))
    assert not pending.is_copied
    assert pending.memory_text.endswith("KiB of the 1000 B")
    pending.write()
    assert verify(pending.settle(Solo()).path)
