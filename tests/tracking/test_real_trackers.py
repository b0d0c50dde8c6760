"""Tests of runs that are handed over to a real MLflow server, to W&B offline, and to TensorBoard's files."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import wait_until

TASK = """
import os, time, torch, dure
from torch.utils.data import TensorDataset

class Toy(dure.Task):
    dies_at: int = 0

    def build_model(self): return torch.nn.Linear(4, 1)

    def train_data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def eval_data(self): return self.train_data()

    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.5)

    def build_schedule(self, optimizer, total_samples): return lambda seen: 0.1

    def loss(self, model, batch):
        time.sleep(0.03)
        x, y = batch
        return dure.Sum(((model(x) - y) ** 2).sum(), len(x))

    def metrics(self, model, batch):
        x, y = batch
        return {"error of ten %": dure.Sum(((model(x) - y) ** 2).sum(), len(x))}
"""


def _start(folder, *flags, **environment):
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DURE_RUNS_DIR": str(folder / "runs")}
    (folder / "toy.py").write_text(TASK)
    command = [sys.executable, "-m", "dure", "train", *map(str, flags)]
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, **quiet, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip


def _train(folder, *flags, code=0, **environment):
    process = _start(folder, *flags, **environment)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == code, errors
    return errors


_TOY = ("toy.py:Toy", "--name", "toy", "--strategy", "ddp", "--nproc", "2", "--global-batch-size", "16")


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory):
    """Address of a real server with a database of its own."""
    pytest.importorskip("mlflow.server", reason="MLflow with its server is not installed: make loggers")
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--default-artifact-root", str(folder), "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )  # fmt: skip

    def answers():
        with socket.socket() as link:
            return link.connect_ex(("127.0.0.1", port)) == 0

    wait_until(answers, "the MLflow server", seconds=90)
    yield f"http://127.0.0.1:{port}"
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.fixture
def client(mlflow_server):
    from mlflow.tracking import MlflowClient

    return MlflowClient(mlflow_server)


def _runs(client, name):
    experiment = client.get_experiment_by_name(name)
    return [] if experiment is None else client.search_runs([experiment.experiment_id])


@pytest.mark.loggers
def test_mlflow_when_a_run_is_stopped_and_resumed_then_one_run_has_all_of_it(tmp_path, client, mlflow_server):
    names = {"MLFLOW_TRACKING_URI": mlflow_server, "MLFLOW_EXPERIMENT_NAME": "resumed"}
    first = _start(tmp_path, *_TOY, "--epochs", "40", "--log", "mlflow", **names)
    wait_until(lambda: _runs(client, "resumed"), "a run at the server")
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    (run,) = _runs(client, "resumed")
    assert (run.info.status, run.info.run_name) == ("KILLED", "toy")
    assert run.data.params["strategy"] == "ddp"
    step = max(metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss"))

    _train(tmp_path, "--resume", "runs/toy", "--nproc", "1", "--strategy", "single", **names)
    (run,) = _runs(client, "resumed")
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert max(metric.step for metric in history) == 160 > step
    assert run.data.params["nproc"] == "2"
    assert run.data.tags["resumed.nproc"] == "1"
    assert run.data.metrics["train/learning_rate"] == pytest.approx(0.05)
    assert run.data.metrics["val/error of ten _"] < history[0].value
    assert run.data.metrics["samples_seen"] == 16 * max(metric.step for metric in history)


@pytest.mark.loggers
def test_mlflow_when_the_launcher_is_killed_then_the_run_is_marked_killed(tmp_path, client, mlflow_server):
    names = {"MLFLOW_TRACKING_URI": mlflow_server, "MLFLOW_EXPERIMENT_NAME": "killed"}
    process = _start(tmp_path, *_TOY, "--epochs", "500", "--log", "mlflow", **names)
    wait_until(lambda: _runs(client, "killed"), "a run at the server")
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: _runs(client, "killed")[0].info.status == "KILLED", "the status of the run")


@pytest.mark.loggers
def test_mlflow_when_training_fails_then_the_run_has_failed(tmp_path, client, mlflow_server):
    (tmp_path / "faults.toml").write_text('[[fault]]\nkind = "raise"\nrank = 1\nstep = 20\n')
    names = {"MLFLOW_TRACKING_URI": mlflow_server, "MLFLOW_EXPERIMENT_NAME": "failed"}
    _train(
        tmp_path,
        *_TOY,
        "--epochs",
        "20",
        "--log",
        "mlflow",
        "--faults",
        "faults.toml",
        "--max-restarts",
        0,
        code=1,
        **names,
    )
    (run,) = _runs(client, "failed")
    assert run.info.status == "FAILED"


@pytest.mark.loggers
@pytest.mark.parametrize("listens", [False, True], ids=["down", "hangs"])
def test_mlflow_when_the_server_is_not_well_then_training_is_done_and_says_what_is_missing(tmp_path, listens):
    pytest.importorskip("mlflow", reason="MLflow is not installed: make loggers")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        if listens:
            mute.listen()
        address = f"http://127.0.0.1:{mute.getsockname()[1]}"
        begin = time.monotonic()
        errors = _train(tmp_path, *_TOY, "--epochs", "5", "--log", "mlflow", MLFLOW_TRACKING_URI=address)
        assert time.monotonic() - begin < 60
    assert "mlflow did not take the last " in errors
    assert "Traceback" not in errors
    assert (tmp_path / "runs/toy/summary.json").is_file()


@pytest.mark.loggers
def test_wandb_when_offline_then_its_file_has_the_settings_the_points_and_the_end(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed: make loggers")
    _train(tmp_path, *_TOY, "--epochs", "5", "--log", "wandb")
    _train(tmp_path, "--resume", "runs/toy", "--epochs", "7")
    first, second = sorted((tmp_path / "runs/toy/wandb").glob("offline-run-*"))
    assert first.name[-8:] == second.name[-8:]
    config, rows, exit_code = _wandb_content(first)
    assert config["strategy"] == '"ddp"'
    assert exit_code == 0
    assert max(float(row["step"]) for row in rows) == 20
    assert {"train/loss", "train/learning_rate", "perf/samples_per_second", "samples_seen"} <= {*rows[0]}
    assert any("val/error of ten %" in row for row in rows)
    assert max(float(row["step"]) for row in _wandb_content(second)[1]) == 28


def _wandb_content(folder: Path):
    from wandb.proto.wandb_internal_pb2 import Record

    config, rows, exit_code = {}, [], None
    for data in _records_of_log(next(folder.glob("*.wandb")).read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for item in record.run.config.update:
            config[item.key] = item.value_json
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
        if record.WhichOneof("record_type") == "exit":
            exit_code = record.exit.exit_code
    return config, rows, exit_code


def _records_of_log(data: bytes):
    """Yield the records of a file in LevelDB's log format, which begins with W&B's seven bytes."""
    assert data[:4] == b":W&B"
    offset, record = 7, b""
    while offset + 7 <= len(data):
        left = 2**15 - offset % 2**15
        if left < 7:
            offset += left
            continue
        length, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_tensorboard_when_trained_then_its_files_have_the_usual_names(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _train(tmp_path, *_TOY, "--epochs", "3", "--tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "runs/toy/tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [*range(1, 13)]
    assert [scalar.step for scalar in events.Scalars("val/loss")] == [4, 8, 12]
    assert events.Scalars("train/learning_rate")[0].value == pytest.approx(0.05)
