"""What rank 0 shows while it trains: one live line in a terminal, plain lines elsewhere."""

import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from dure.measure.records import Metric, StepRecord
from dure.telling import has_live_line, is_notebook
from dure.units import format_seconds

_LIVE_SECONDS = 0.1
_NOTEBOOK_SECONDS = 0.5
"""A notebook saves each state of the line."""
_PLAIN_SECONDS = 10.0
_SMOOTHING = 0.1


class Progress:
    """Shows epoch, step, samples per second, loss, last metric, time to go and the share of waiting for data."""

    def __init__(
        self,
        total_samples: int,
        samples_seen: int,
        *,
        quiet: bool,
        stream: TextIO | None = None,
        is_relayed_live: bool = False,
    ) -> None:
        """Begin to measure.

        Args:
            total_samples: Of the whole run.
            samples_seen: So far.
            quiet: Whether nothing is shown.
            stream: Where it is; stderr by default.
            is_relayed_live: Whether the stream is a pipe to a process that shows the live line in a terminal, cut to
                its width.
        """
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._is_relayed = is_relayed_live
        self._is_live = is_relayed_live or has_live_line(self._stream)
        self._has_color = self._is_live and not os.environ.get("NO_COLOR")
        self._interval = _LIVE_SECONDS if self._is_live else _PLAIN_SECONDS
        if is_notebook(self._stream):
            self._interval = _NOTEBOOK_SECONDS
        self._total_samples = total_samples
        self._next_time = 0.0 if self._is_live else time.time() + 1.0
        self._last_samples = samples_seen
        self._wall_seconds = 0.0
        self._data_seconds = 0.0
        self._samples_per_second = 0.0
        self._data_fraction = 0.0
        self._metric = ""
        self._erase = "" if is_notebook(self._stream) else "\x1b[K"
        self._drawn_columns = 0
        """Of the open line; 0: there is none."""

    def step(self, record: StepRecord) -> None:
        """Take note of a step, and show it if it is time."""
        self._wall_seconds += record.wall_seconds
        self._data_seconds += record.data_seconds
        if self._quiet or record.time < self._next_time:
            return
        self._next_time = record.time + self._interval
        self._measure(record.samples_seen)
        self._show(self._line(record))

    def evaluated(self, metrics: Mapping[str, Metric], epochs: float, train_loss: float | None) -> None:
        """Show an evaluation on a line that stays."""
        shown = "  ".join(f"val {name} {metric.value:.4f}" for name, metric in metrics.items())
        name = next((name for name in metrics if name != "loss"), "loss")
        self._metric = f"val {name} {metrics[name].value:.4f}"
        trained = "" if train_loss is None else f"train loss {train_loss:.4f}  "
        self.say(f"epoch {epochs:g}  {trained}{shown}")

    def say(self, text: str) -> None:
        """Print text on lines that stay."""
        if self._quiet:
            return
        self._close_line()
        self._write(f"{text}\n")

    def close(self) -> None:
        """Leave the terminal on a fresh line."""
        self._close_line()

    def _measure(self, samples_seen: int) -> None:
        if self._wall_seconds > 0:
            rate = (samples_seen - self._last_samples) / self._wall_seconds
            weight = 1.0 if self._samples_per_second == 0 else max(_SMOOTHING, min(1.0, self._wall_seconds / 5))
            self._samples_per_second += weight * (rate - self._samples_per_second)
            self._data_fraction += weight * (self._data_seconds / self._wall_seconds - self._data_fraction)
        self._last_samples, self._wall_seconds, self._data_seconds = samples_seen, 0.0, 0.0

    def _line(self, record: StepRecord) -> str:
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
        return "  ".join([f"{percent:4.0%}", *words])

    def _show(self, line: str) -> None:
        if not self._is_live:
            self._write(f"{line}\n")
            return
        if not self._is_relayed:
            width = shutil.get_terminal_size().columns
            line = line if len(line) < width else line[: width - 2] + "…"
        colored = f"\x1b[36m{line[:4]}\x1b[0m{line[4:]}" if self._has_color else line
        # relayed, a second "\r" lets what the task prints next take the line's place, not go on in it
        self._write(f"\r{colored}\r" if self._is_relayed else f"{self._over()}{colored}{self._erase}")
        self._drawn_columns = len(line)

    def _over(self) -> str:
        """Return what goes back to the begin of the open line; in a notebook, which erases nothing, over it."""
        return "\r" if self._erase else f"\r{' ' * self._drawn_columns}\r"

    def _close_line(self) -> None:
        if self._drawn_columns:
            self._write(f"{self._over()}{self._erase}")
            self._drawn_columns = 0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            # a pager or a pipe that went away must not end a run: it trains on in silence
            self._quiet = True
