"""Step records as columns."""

import json

import numpy as np
import pytest

from dure.records.step_columns import COLUMNS, read_columns
from dure.records.step_record import StepRecord, step_line


def line(step: int, wall: float = 0.5) -> str:
    return step_line(
        StepRecord(
            time=1e9, step=step, epoch=0, samples_seen=step, loss_sum=1.0, loss_count=1, data_seconds=0.1,
            forward_backward_seconds=0.2, sync_seconds=0.0, optimizer_seconds=0.1, wall_seconds=wall, sent_bytes=7,
        )
    )  # fmt: skip


def test_columns_when_a_step_was_repeated_then_its_last_record_counts(tmp_path):
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join([line(1), line(2), line(3, wall=9.0), line(3), line(4)]))
    found = read_columns(path)
    assert (found.steps.tolist(), found.values["wall_seconds"].tolist(), found.num_left_out) == (
        [1, 2, 3, 4],
        [0.5] * 4,
        0,
    )
    assert set(found.values) == set(COLUMNS)


def test_columns_when_there_is_no_file_then_are_empty(tmp_path):
    assert read_columns(tmp_path / "rank0.jsonl").steps.size == 0


@pytest.mark.parametrize(
    "damage",
    ["{", '{"step": 3}', "[1]", "null", '{"step": 3, "step": 4}', "[" * 100_000, line(3).replace("0.1", "1e999"),
     line(3).replace("7}", '"x"}'), line(3).replace("7}", "[7]}"),
     line(3).replace('"step": 3', '"step": 1' + 400 * "0"), "\x00\xff", line(3).replace('"step": 3', '"step": 1e300'),
     line(3).replace('"step": 3', '"step": 1.5'), line(-3), json.dumps({name: [1, 2, 3] for name in COLUMNS})],
)  # fmt: skip
def test_columns_when_a_line_is_no_record_then_it_is_counted_and_left_out(damage, tmp_path):
    path = tmp_path / "rank0.jsonl"
    path.write_text(line(1) + damage.rstrip("\n") + "\n\n" + line(2))
    found = read_columns(path)
    assert (found.steps.tolist(), found.num_left_out) == ([1, 2], 1)


def test_columns_when_there_are_many_then_are_read_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.records.step_columns._BLOCK_BYTES", 1000)
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(map(line, range(1, 101))))
    assert np.array_equal(read_columns(path).steps, np.arange(1, 101))


def test_columns_when_some_steps_lack_the_time_of_their_backward_then_it_is_unknown(tmp_path):
    path = tmp_path / "rank0.jsonl"
    path.write_text(line(1) + line(2).replace('"sent_bytes"', '"backward_seconds": 0.15, "sent_bytes"') + line(3))
    found = read_columns(path, ("step", "wall_seconds", "backward_seconds"))
    np.testing.assert_equal(found.values["backward_seconds"], [np.nan, 0.15, np.nan])
    assert found.num_left_out == 0
