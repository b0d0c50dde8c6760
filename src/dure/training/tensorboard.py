"""TensorBoard scalars of a run, under the usual names."""

import math
from collections.abc import Mapping
from pathlib import Path

from dure.errors import EnvironmentLacks
from dure.own_files import make_folder, restrict_files
from dure.records.step_record import Metric, StepRecord

_LEAST_SECONDS = 0.01


class Scalars:
    """Writer of `train/…`, `val/…` and `perf/…`, for at most a hundred steps a second."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise EnvironmentLacks(
                "--tensorboard needs the package tensorboard: pip install 'dure[tensorboard]'"
            ) from None
        make_folder(folder, exist_ok=True)
        self._writer = SummaryWriter(str(folder))
        restrict_files(folder)  # the package creates its files with the umask alone
        self._next_time = 0.0

    def step(self, record: StepRecord, learning_rate: float, num_samples: int) -> None:
        """Write a step's scalars, unless the last ones are less than `_LEAST_SECONDS` old."""
        if record.time < self._next_time:
            return
        self._next_time = record.time + _LEAST_SECONDS
        for tag, value in (
            ("train/loss", record.loss_sum / record.loss_count if record.loss_count else math.nan),
            ("train/learning_rate", learning_rate),
            ("train/epoch", record.epoch),
            ("perf/samples_per_second", num_samples / record.wall_seconds),
            ("perf/data_fraction", record.data_seconds / record.wall_seconds),
            ("perf/sync_fraction", record.sync_seconds / record.wall_seconds),
        ):
            self._writer.add_scalar(tag, value, record.step)

    def evaluated(self, metrics: Mapping[str, Metric], step: int) -> None:
        """Write an evaluation's scalars."""
        for name, metric in metrics.items():
            self._writer.add_scalar(f"val/{name}", metric.value, step)

    def close(self) -> None:
        """Flush and close the writer."""
        self._writer.close()
