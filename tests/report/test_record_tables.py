"""Tables of a run's records."""

import csv
import math

import numpy as np
import pytest

from dure.cli.app import main
from dure.errors import EnvironmentLacks, Misuse
from dure.records.events import Evaluated, Training
from dure.records.run_dir import RunDir
from dure.records.step_record import Metric, StepRecord, step_line
from dure.report.record_tables import RecordTable, check_file, evaluations_table, steps_table, write_table


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.json").write_text("{}")
    return RunDir(tmp_path / "run")


def step(number, **changes):
    record = StepRecord(
        time=1e9, step=number, epoch=0, samples_seen=8 * number, loss_sum=6.0, loss_count=8, data_seconds=0.1,
        forward_backward_seconds=0.2, sync_seconds=0.0, optimizer_seconds=0.1, wall_seconds=0.5, sent_bytes=7,
    )  # fmt: skip
    return step_line(record._replace(**changes))


def test_steps_when_ranks_have_different_ones_then_each_has_a_row(run):
    run.records_path(0).write_text(step(1) + step(2) + step(2, measured={"staleness": 2}))
    run.records_path(1).write_text(step(1, loss_count=0) + "{\n")
    table = steps_table(run)
    assert (table.num_rows, table.num_left_out) == (3, 1)
    columns = {name: values.tolist() for name, values in table.columns.items()}
    assert (columns["rank"], columns["step"], columns["sent_bytes"]) == ([0, 0, 1], [1, 2, 1], [7, 7, 7])
    assert columns["loss"][:2] == [0.75, 0.75]
    assert math.isnan(columns["loss"][2])
    assert str(columns["measured.staleness"]) == "[nan, 2.0, nan]"
    assert {"samples", "measured"}.isdisjoint(columns)


def test_steps_when_a_record_claims_more_than_a_whole_number_then_its_column_has_decimals(run):
    run.records_path(0).write_text(step(1, sent_bytes=2**70, measured={"huge": 10**400, "text": "x", "list": [1]}))
    table = steps_table(run)
    assert table.columns["sent_bytes"].tolist() == [2.0**70]
    assert not any(name.startswith("measured.") for name in table.columns)


def test_steps_when_a_name_is_no_text_then_it_is_written_out(run, tmp_path):
    run.records_path(0).write_text(step(1, measured={"a\ud800": 1.0}))
    write_table(steps_table(run), tmp_path / "steps.csv")
    assert r"measured.a\ud800" in (tmp_path / "steps.csv").read_text()


def test_steps_when_records_have_very_many_measurements_then_some_are_read(run):
    for rank in range(4):
        run.records_path(rank).write_text(step(1, measured={f"{rank}.{number}": 1.0 for number in range(1000)}))
    assert sum(name.startswith("measured.") for name in steps_table(run).columns) == 64


def test_tables_when_there_are_no_records_then_are_empty(run):
    assert (steps_table(run).num_rows, evaluations_table(run).num_rows) == (0, 0)


def evaluated(number, metrics):
    metrics = {name: Metric(value=value, count=4) for name, value in metrics.items()}
    return Evaluated(
        time=1e9, step=number, samples_seen=8 * number, epochs=0.5, train_loss=None, metrics=metrics, is_best=True,
        best_metric="loss", seconds=0.1, seconds_since_last=0.2,
    )  # fmt: skip


def test_evaluations_when_a_metric_is_new_then_earlier_rows_have_none(run):
    for event in (evaluated(1, {"loss": 1.0}), evaluated(2, {"loss": 0.5, "=1+1": math.inf})):
        run.append_event(event)
    columns = {name: values.tolist() for name, values in evaluations_table(run).columns.items()}
    assert (columns["step"], columns["metric.loss"], columns["count.loss"]) == ([1, 2], [1.0, 0.5], [4.0, 4.0])
    assert str(columns["metric.=1+1"]) == "[nan, inf]"
    assert str(columns["train_loss"]) == "[nan, nan]"


TABLE = RecordTable(
    columns={"step": np.array([1, 2]), 'a,"b\n': np.array([0.1, math.nan]), "is_best": np.array([True, False])},
    num_left_out=0,
)


def test_csv_when_read_again_then_has_every_digit_and_an_empty_cell_for_nan(tmp_path):
    write_table(TABLE, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        assert [*csv.reader(file)] == [["step", 'a,"b\n', "is_best"], ["1", "0.1", "True"], ["2", "", "False"]]


def test_parquet_when_read_again_then_has_types_and_null_for_nan(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'dure[parquet]'")
    write_table(TABLE, tmp_path / "table.parquet")
    table = parquet.read_table(tmp_path / "table.parquet")
    assert table.to_pydict() == {"step": [1, 2], 'a,"b\n': [0.1, None], "is_best": [True, False]}
    assert [str(kind) for kind in table.schema.types] == ["int64", "double", "bool"]


def test_file_when_it_cannot_be_written_then_nothing_is_left_of_it_and_an_earlier_one_stays(tmp_path, monkeypatch):
    (tmp_path / "table.csv").write_text("earlier")

    def full(columns, path):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dure.report.record_tables._WRITERS", {".csv": full})
    with pytest.raises(Misuse, match=r"cannot be written \(No space left on device\)"):
        write_table(TABLE, tmp_path / "table.csv")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("table.csv", "earlier")]


def test_file_when_a_link_is_in_the_place_of_its_copy_then_it_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / ".table.csv.writing").symlink_to(tmp_path / "other")
    write_table(TABLE, tmp_path / "table.csv")
    assert (tmp_path / "other").read_text() == "kept"
    assert not (tmp_path / "table.csv").is_symlink()


def test_file_when_it_cannot_be_then_it_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    with pytest.raises(Misuse, match=r"has the ending \.xlsx: use one of \.csv, \.parquet"):
        check_file(tmp_path / "steps.xlsx")
    with pytest.raises(Misuse, match=r"steps has no ending: use one of \.csv, \.parquet"):
        check_file(tmp_path / "steps")
    with pytest.raises(Misuse, match="there is no folder"):
        check_file(tmp_path / "nowhere" / "steps.csv")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(EnvironmentLacks, match=r"pip install 'dure\[parquet\]', or write \.csv"):
        check_file(tmp_path / "steps.parquet")


def test_command_when_a_rank_has_no_records_then_says_which(run, tmp_path, capsys):
    run.records_path(0).write_text(step(1))
    run.append_event(
        Training(
            world_size=3, num_devices=3, device="cpu", epoch_samples=8, total_samples=8, samples_seen=0, step=0
        )
    )  # fmt: skip
    assert main(["export-records", str(run.path), str(tmp_path / "steps.csv")]) == 0
    assert capsys.readouterr().err == "dure: the records of ranks 1, 2 are missing, and have no rows\n"


def test_command_when_it_has_written_a_table_then_says_what_is_in_it(run, tmp_path, capsys):
    run.records_path(0).write_text(step(1) + "{\n")
    assert main(["export-records", str(run.path), str(tmp_path / "steps.csv")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/steps.csv: 1 row of 15 columns; damaged lines left out: 1\n"
    assert main(["export-records", str(run.path), str(tmp_path / "steps.csv"), "--json"]) == 0
    assert '"num_rows": 1,' in capsys.readouterr().out
    script = RunDir.create(tmp_path, "script", for_script=True)
    script.write_script({"script": "/x/train.py", "world_size": 2})
    assert main(["export-records", str(script.path), str(tmp_path / "steps.csv")]) == 2
    assert "which has no records of evaluations, and of steps only with --record" in capsys.readouterr().err
    run.records_path(0).unlink()
    assert main(["export-records", str(run.path), str(tmp_path / "steps.csv")]) == 0
    assert "has no steps on record: see `dure doctor" in capsys.readouterr().err
    assert main(["export-records", str(tmp_path), str(tmp_path / "steps.csv")]) == 2
