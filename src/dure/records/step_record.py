"""The records of a run: one line per step, one per evaluation, one summary."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from dure.checked import Number


class StepRecord(NamedTuple):
    """One optimiser step as one rank saw it: a line of `rank<r>.jsonl`.

    A tuple, because one is made every step: a frozen dataclass of 13 fields takes four times as long to make.
    """

    time: float
    """Seconds since the epoch at the end of the step."""
    step: int
    """Optimiser steps done, this one included; counted over the whole run, resumes included."""
    epoch: int
    """Epoch of the samples of this step, from 0."""
    samples_seen: int
    """Samples used by all ranks since the start of the run, this step included."""
    loss_sum: float
    """The loss summed over the samples (or tokens) of this step, over all ranks; in a step in which ranks do not talk
    (`averaging`), over this rank's alone."""
    loss_count: float
    """Divisor of `loss_sum` that gives the mean loss, over all ranks."""
    data_seconds: float
    """Seconds spent waiting for this step's data."""
    forward_backward_seconds: float
    """Seconds spent computing, including the communication hidden behind it."""
    sync_seconds: float
    """Seconds of communication that was not hidden."""
    optimizer_seconds: float
    """Seconds of clipping and the optimiser's step."""
    wall_seconds: float
    """Seconds from the end of the step before to the end of this one."""
    sent_bytes: int
    """Bytes that this rank sent to others for this step, by the strategy's formula."""
    samples: list[int] | None = None
    """Data indices that this rank used, in order, with `--record-samples`. Of ranks that work on the same samples, the
    first has them and the others an empty list."""
    measured: dict[str, float] | None = None
    """Measurements that only this strategy makes: staleness, bubble fraction, compression error, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A metric over the whole evaluation data."""

    value: Number
    count: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRow:
    """One evaluated point of a run, as the end table shows it."""

    epoch: float
    """Epochs done, fractional when the evaluation stood inside one."""
    samples_seen: int
    train_loss: float | None
    """Mean training loss since the evaluation before."""
    metrics: dict[str, Metric]
    seconds: float
    """Wall seconds since the evaluation before, the evaluation included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Summary of a run: `summary.json`, the result of `dure.train`, and `--json`."""

    run: str
    """Run folder."""
    status: str
    """`completed`, `interrupted` or `failed`."""
    strategy: str
    world_size: int
    """Number of processes (torchrun's meaning)."""
    num_devices: int
    """Number of devices that the work was divided over; more than `world_size` for `dp` and `balanced_dp`."""
    device: str
    precision: str
    steps: int
    samples: int
    epochs: float
    final_loss: float | None
    """Mean training loss over the last step's global batch, whose few samples make it jump from step to step; of an
    epoch there is the mean in `rows`."""
    metrics: dict[str, Metric]
    """Metrics of the last evaluation."""
    best: dict[str, Any] | None
    """Best evaluation: `metric`, `value`, `samples_seen`, `checkpoint`."""
    wall_seconds: float
    """Seconds of training and evaluation over all attempts, start-up excluded."""
    samples_per_second: float
    """Training samples over training seconds (evaluation and checkpoints excluded)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of rank 0 by activity: data, forward_backward, sync, optimizer, evaluation, checkpoint, other."""
    rows: list[EpochRow] = field(default_factory=list)
    not_preserved: list[str] = field(default_factory=list)
    """Properties of the one-device run that the strategy, as used here, does not preserve."""
    message: str | None = None
    """Reason why the run ended early, if it did."""
    restarts: int = 0
    """Number of times that all ranks were started again after one failed."""
    microbatch_size: int | None = None
    """Samples that a device computed at once in the end, if memory ran out with more."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RunSummary":
        """Rebuild a summary from `to_json`'s answer.

        Raises:
            TypeError: A field is unknown or missing.
        """
        metrics = {name: Metric(**metric) for name, metric in data["metrics"].items()}
        rows = [
            EpochRow(**{**row, "metrics": {k: Metric(**m) for k, m in row["metrics"].items()}}) for row in data["rows"]
        ]
        return cls(**{**data, "metrics": metrics, "rows": rows})
