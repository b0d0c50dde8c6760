"""Events: what is written is read, and what is of a newer dure, or damaged, is kept as it stands."""

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from dure.documents import DocumentInvalid
from dure.records.events import (
    EVENTS,
    CheckpointSaved,
    Completed,
    Evaluated,
    Interrupted,
    MicrobatchHalved,
    RankLost,
    UnknownEvent,
    UnusedShare,
    event_from_json,
    event_to_json,
)
from dure.records.run_dir import RunDir
from dure.records.step_record import Metric

SHARE = UnusedShare(rank=1, step=3, epoch=0, samples_seen=12, samples=(4, 5))
WRITTEN = [
    Completed(samples_seen=4),
    Interrupted(signal=15),
    Interrupted(message="stopped"),
    MicrobatchHalved(before=8, after=4, rank=1, step=-1, message="out of memory"),
    RankLost(rank=1, samples_seen=12, shares=(SHARE,)),
    Evaluated(
        step=1, samples_seen=4, epochs=1.0, train_loss=None, metrics={"loss": Metric(value=float("inf"), count=4)},
        is_best=True, best_metric="loss", seconds=0.1, seconds_since_last=1,
    ),
]  # fmt: skip


@pytest.mark.parametrize("event", WRITTEN, ids=lambda event: type(event).__name__)
def test_event_when_written_and_read_then_it_is_the_same(event, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run")
    run.append_event(event)
    assert list(run.events()) == [event]


def test_event_when_written_then_names_in_the_file_are_what_they_were() -> None:
    halved = event_to_json(MicrobatchHalved(time=1.0, before=8, after=4, rank=1, step=2, message="full"))
    assert halved == {
        "time": 1.0, "event": "microbatch_halved", "version": 1, "from": 8, "to": 4, "rank": 1, "step": 2,
        "message": "full",
    }  # fmt: skip
    assert event_to_json(Interrupted(time=1.0, signal=2)).keys() == {"time", "event", "version", "signal"}


def test_events_when_listed_then_each_is_frozen_and_has_a_class_of_its_own() -> None:
    assert len(set(EVENTS.values())) == len(EVENTS)
    assert all(is_dataclass(kind) and fields(kind)[0].name == "time" for kind in EVENTS.values())


def test_checkpoint_when_it_is_of_the_first_dure_then_its_seconds_were_a_stall() -> None:
    old = {"event": "checkpoint", "time": 1.0, "path": "x", "samples_seen": 4, "step": 1, "num_bytes": 9, "seconds": 2}
    event = event_from_json(old)
    assert isinstance(event, CheckpointSaved)
    assert (event.stall_seconds, event.beside_bytes) == (2, 0)


@pytest.mark.parametrize(
    "found",
    [
        {"event": "moved", "time": 1.0, "version": 3, "to": "the moon"},
        {"event": "completed", "time": 1.0, "version": 2, "samples": 4},
        {"event": "completed", "time": 1.0, "samples_seen": "all"},
    ],
    ids=["new name", "new fields", "damaged"],
)
def test_event_when_it_is_not_known_then_it_is_kept_as_it_stands(found: dict[str, Any]) -> None:
    event = event_from_json(found)
    assert isinstance(event, UnknownEvent)
    assert (event.fault is None) == (found["event"] not in EVENTS)
    assert event_to_json(event) == found


@pytest.mark.parametrize(
    "line",
    ["{}", '{"event": "completed"}', '{"event": 3, "time": 1}', '{"event": "completed", "time": NaN}', "[]", '{"time'],
)
def test_event_when_it_is_none_then_it_is_left_out(line: str, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "run")
    (run.path / "events.jsonl").write_text(f"{line}\n")
    assert list(run.events()) == []
    if line.startswith("{") and line.endswith("}"):
        with pytest.raises(DocumentInvalid, match=r"holds other fields|no name of an event"):
            event_from_json(json.loads(line))
