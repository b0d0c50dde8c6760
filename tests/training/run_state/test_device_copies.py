"""Copies from accelerators: their order, what is waited for, and snapshots that are whole only afterwards.

Streams are played by a list of what they are asked to do, and accelerators by the host.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dure.host.device_kinds import KINDS
from dure.training.checkpoints import staging
from dure.training.run_state import snapshot_policy as memory_saver
from dure.training.run_state.capture import Progression
from dure.training.run_state.snapshot_policy import MemorySaver
from dure.training.snapshots import device_copies
from dure.training.snapshots import writer as snapshot_writer
from dure.training.snapshots.device_copies import DeviceCopies
from dure.training.snapshots.memory import ShareLayout, positions, read_share
from dure.training.snapshots.writer import SnapshotWriter
from tests.training.snapshots.test_snapshot_memory import at, shard_of
from tests.training.snapshots.test_snapshot_state import Net, momentum, session_of


class Streams:
    """Log of the calls to streams, in order; copies are done when their event is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waiting: list[Any] = []
        self.now = "computing"

    def stream(self, name: str) -> Any:
        streams = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                streams.log.append(f"{name} waits")
                if name == "computing":
                    streams.finish()

            def record_event(self) -> Any:
                return type("Event", (), {"synchronize": staticmethod(streams.finish)})()

            def __enter__(self) -> None:
                streams.now = name

            def __exit__(self, *error: object) -> None:
                streams.now = "computing"

        return Stream()

    def copy_all(self, targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool) -> None:
        assert non_blocking
        self.log += [f"{self.now} copies {source.numel()}" for source in sources]
        self.waiting += zip(targets, sources, strict=True)

    def finish(self) -> None:
        for target, source in self.waiting:
            target.copy_(source)
        self.waiting.clear()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    played = Streams()
    computing, copying = played.stream("computing"), played.stream("copying")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch, "Stream", lambda device: copying)
    monkeypatch.setattr(device_copies, "copy_all", played.copy_all)
    return played


@pytest.fixture
def descriptor() -> Iterator[int]:
    memory = os.memfd_create("snapshots")
    yield memory
    os.close(memory)


def test_copies_when_begun_hold_up_what_is_launched_later_for_what_is_not_steady_alone(streams):
    copies, targets = DeviceCopies(), [torch.zeros(2), torch.zeros(3)]
    weight, buffer = torch.ones(2), torch.ones(3)
    copies.begin(targets, [weight, buffer], [True, False])
    assert streams.log == ["copying waits", "copying copies 3", "computing waits", "copying copies 2"]
    assert (targets[0].sum(), targets[1].sum(), copies.is_complete) == (0, 3, False)
    buffer += 1
    assert copies.complete()
    assert (targets[0].sum(), targets[1].sum(), copies.is_complete) == (2, 3, True)


def test_copies_when_a_steady_tensor_changes_meanwhile_say_so_once(streams):
    copies, weight = DeviceCopies(), torch.ones(2)
    copies.begin([torch.zeros(2)], [weight], [True])
    weight.detach().mul_(2)
    assert not copies.complete()
    assert copies.complete()


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> list[tuple[str, int]]:
    """Take floating tensors for ones on an accelerator; return which memory is pinned."""
    pinned: list[tuple[str, int]] = []
    for module in (snapshot_writer, memory_saver):
        monkeypatch.setattr(module, "can_copy_beside", lambda tensor: tensor.is_floating_point())
    monkeypatch.setattr(snapshot_writer, "device_kind", lambda kind: KINDS["cuda"])
    monkeypatch.setattr(snapshot_writer, "pin_host_memory", lambda address, size: pinned.append(("pin", size)) or True)
    monkeypatch.setattr(snapshot_writer, "unpin_host_memory", lambda address: pinned.append(("unpin", 0)))
    return pinned


def test_snapshot_when_copied_beside_training_is_whole_only_when_completed(descriptor, away):
    weights = torch.ones(4)
    share = shard_of(weights)
    writer, layout = SnapshotWriter(descriptor), ShareLayout(share)
    steady = [tensor is weights for tensor in share.tensors()]
    for step in (1, 2):
        weights.fill_(step)
        writer.write(layout, share.tensors(), share.state, at(step), steady=steady)
        assert at(step) not in positions(descriptor)
        assert not writer.is_complete
        assert writer.complete()
        assert at(step) in positions(descriptor)
        assert read_share(descriptor, at(step)).share.parts["model"]["w"].tolist() == [step] * 4
    # the memory grew once more for the second place
    size = os.fstat(descriptor).st_size
    assert [kind for kind, _ in away] == ["pin", "unpin", "pin"]
    assert away[-1] == ("pin", size)


def test_snapshot_when_its_tensors_change_while_they_are_copied_is_none(descriptor, away):
    weights = torch.ones(4)
    share = shard_of(weights)
    writer, layout = SnapshotWriter(descriptor), ShareLayout(share)
    writer.write(layout, share.tensors(), share.state, at(1))
    writer.write(layout, share.tensors(), share.state, at(2), steady=[True] * 2 + [False])
    weights.add_(1)
    assert not writer.complete()
    assert positions(descriptor) == [at(1)]


@pytest.mark.parametrize("meddles", [False, True])
def test_saver_when_tensors_are_on_a_device_waits_before_the_optimiser_and_looks_whether_they_stay(
    meddles, descriptor, away, monkeypatch
):
    session, progression = session_of(Net(), momentum()), Progression()
    monkeypatch.setattr(session.strategy, "devices", (torch.device("cuda", 0),))
    monkeypatch.setattr("dure.training.seeds.default_generator", lambda device: torch.Generator())
    model, optimizer = session.strategy.model, session.strategy.optimizer
    saver = MemorySaver(session, progression, [descriptor], None, pytest.fail)
    assert saver.every == 2
    beside = []
    for step in range(1, 7):
        progression.step, progression.samples_seen = step, 8 * step
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        if meddles:
            model.first.weight.data.mul_(0.9)
        saver.before_change()
        assert saver._writer is None or saver._writer.is_complete
        optimizer.step()
        if saver.is_due():
            saver.take(lambda: None)
            beside.append(saver._is_beside)
    assert beside == [False, not meddles, not meddles]
    saver.before_change()
    assert {position.step for position in positions(descriptor)} == {4, 6}


def test_staging_when_sources_are_on_several_devices_wait_for_each(monkeypatch):
    awaited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", awaited.append)
    staging._await({torch.device("cuda", 1), torch.device("cuda", 0)})
    assert sorted(map(str, awaited)) == ["cuda:0", "cuda:1"]
