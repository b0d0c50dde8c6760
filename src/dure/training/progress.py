"""Progress shown by rank 0 during training: one live line in a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from dure.records.step_record import Metric, StepRecord
from dure.terminal import LiveLine
from dure.units import format_seconds

_LIVE_SECONDS = 0.1
_NOTEBOOK_SECONDS = 0.5
"""Seconds between updates in a notebook, which saves each state of the line."""
_PLAIN_SECONDS = 10.0
_SMOOTHING = 0.1
_PERCENT_COLUMNS = 4


class Progress:
    """Display of epoch, step, samples per second, loss, last metric, remaining time and time spent waiting for data."""

    def __init__(
        self,
        total_samples: int,
        samples_seen: int,
        *,
        quiet: bool,
        stream: TextIO | None = None,
        is_relayed_live: bool = False,
    ) -> None:
        """Start to measure.

        Args:
            total_samples: Samples of the whole run.
            samples_seen: Samples used so far.
            quiet: Whether to show nothing.
            stream: Stream for the output; None for stderr.
            is_relayed_live: Whether the stream is a pipe to a process that shows the live line in a terminal, cut to
                its width.
        """
        self._line = LiveLine(stream, is_relayed=is_relayed_live)
        self._quiet = quiet
        self._interval = _LIVE_SECONDS if self._line.is_live else _PLAIN_SECONDS
        if self._line.is_in_notebook:
            self._interval = _NOTEBOOK_SECONDS
        self._total_samples = total_samples
        self._next_time = 0.0 if self._line.is_live else time.time() + 1.0
        self._last_samples = samples_seen
        self._wall_seconds = 0.0
        self._data_seconds = 0.0
        self._samples_per_second = 0.0
        self._data_fraction = 0.0
        self._metric = ""

    def step(self, record: StepRecord) -> None:
        """Record a step, and show it if an update is due."""
        self._wall_seconds += record.wall_seconds
        self._data_seconds += record.data_seconds
        if self._quiet or record.time < self._next_time:
            return
        self._next_time = record.time + self._interval
        self._measure(record.samples_seen)
        with self._while_read():
            self._line.show(self._line_text(record), num_colored=_PERCENT_COLUMNS)

    def evaluated(self, metrics: Mapping[str, Metric], epochs: float, train_loss: float | None) -> None:
        """Show an evaluation on a permanent line."""
        shown = "  ".join(f"val {name} {metric.value:.4f}" for name, metric in metrics.items())
        name = next((name for name in metrics if name != "loss"), "loss")
        self._metric = f"val {name} {metrics[name].value:.4f}"
        trained = "" if train_loss is None else f"train loss {train_loss:.4f}  "
        self.print_lines(f"epoch {epochs:g}  {trained}{shown}")

    def print_lines(self, text: str) -> None:
        """Print text on permanent lines."""
        if not self._quiet:
            with self._while_read():
                self._line.print_lines(text)

    def close(self) -> None:
        """Leave the terminal on a new line."""
        with self._while_read():
            self._line.close()

    @contextmanager
    def _while_read(self) -> Iterator[None]:
        """Silence all later output if a pager or a pipe was closed, so that this does not end the run."""
        try:
            yield
        except OSError:
            self._quiet = True

    def _measure(self, samples_seen: int) -> None:
        if self._wall_seconds > 0:
            rate = (samples_seen - self._last_samples) / self._wall_seconds
            weight = 1.0 if self._samples_per_second == 0 else max(_SMOOTHING, min(1.0, self._wall_seconds / 5))
            self._samples_per_second += weight * (rate - self._samples_per_second)
            self._data_fraction += weight * (self._data_seconds / self._wall_seconds - self._data_fraction)
        self._last_samples, self._wall_seconds, self._data_seconds = samples_seen, 0.0, 0.0

    def _line_text(self, record: StepRecord) -> str:
        left = (self._total_samples - record.samples_seen) / max(self._samples_per_second, 1e-9)
        words = [  # the last ones are cut off in a narrow terminal
            f"epoch {record.epoch + 1}",
            f"step {record.step}",
            f"{self._samples_per_second:,.0f} samples/s",
            *([f"loss {record.loss_sum / record.loss_count:.4f}"] if record.loss_count else []),
            f"ETA {format_seconds(left)}",
            *([self._metric] if self._metric else []),
            f"data wait {self._data_fraction:.0%}",
        ]
        percent = record.samples_seen / self._total_samples
        return "  ".join([f"{percent:{_PERCENT_COLUMNS}.0%}", *words])
