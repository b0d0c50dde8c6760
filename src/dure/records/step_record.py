"""Records of a run: one line per step, one per evaluation, one summary."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from dure.checked import Count, Number, Text, Time, checked

VERSION = 1
"""Version of step lines and summaries."""
PARTS = ("data", "forward_backward", "sync", "optimizer")
"""Measured parts of a step in their order, each with a field `<part>_seconds`; what they leave of it is `other`."""
BACKWARD = "backward_seconds"
"""Field of a step that may be missing."""


def split_parts(seconds: Mapping[str, Any], backward: Any) -> dict[str, Any]:
    """Return seconds by part, with `forward` and `backward` in place of both together.

    Args:
        seconds: Seconds of each part, numbers or arrays.
        backward: Those of the backward.
    """
    found: dict[str, Any] = {}
    for part, value in seconds.items():
        found |= {"forward": value - backward, "backward": backward} if part == "forward_backward" else {part: value}
    return found


RATES = "learning_rate"
"""Measurement of a step with its learning rate; those of further parameter groups are `learning_rate.1` and so on."""


class StepRecord(NamedTuple):
    """One optimiser step as recorded by one rank: a line of `rank<r>.jsonl`.

    This is a tuple because one is created every step: a frozen dataclass of 13 fields takes four times as long.
    """

    time: Time
    """Seconds since the epoch at the end of the step."""
    step: Count
    """Number of completed optimiser steps, including this one, over the whole run and all resumes."""
    epoch: Count
    """Epoch of the samples of this step, from 0."""
    samples_seen: Count
    """Samples used by all ranks since the start of the run, including this step."""
    loss_sum: Number
    """Loss summed over the samples (or tokens) of this step, over all ranks; over this rank's alone in a step without
    communication (`averaging`)."""
    loss_count: Number
    """Divisor of `loss_sum` that gives the mean loss, over all ranks."""
    data_seconds: Number
    """Seconds spent waiting for this step's data."""
    forward_backward_seconds: Number
    """Seconds spent computing, including the communication hidden behind it."""
    sync_seconds: Number
    """Seconds of communication that was not hidden."""
    optimizer_seconds: Number
    """Seconds of clipping and the optimiser's step."""
    wall_seconds: Number
    """Seconds from the end of the previous step to the end of this one."""
    sent_bytes: Count
    """Bytes that this rank sent for this step, by the strategy's formula."""
    samples: list[Count] | None = None
    """Data indices that this rank used, in order, with `--record-samples`; None without. Of ranks that compute the same
    samples, the first has the indices and the others an empty list."""
    measured: dict[Text, Number] | None = None
    """Further measurements: a strategy's (staleness, bubble fraction, compression error, ...), or a script's."""
    backward_seconds: Number | None = None
    """Seconds of `forward_backward_seconds` in backward; None if the two cannot be told apart, as in a pipeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """Metric over the whole evaluation data."""

    value: Number
    count: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochRow:
    """One evaluation of a run, as shown in the end table."""

    epoch: Number
    """Completed epochs, fractional if the evaluation was within an epoch."""
    samples_seen: Count
    train_loss: Number | None
    """Mean training loss since the previous evaluation."""
    metrics: dict[Text, Metric]
    seconds: Number
    """Wall seconds since the previous evaluation, including this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Summary of a run: `summary.json`, the result of `dure.train`, and `--json`."""

    run: Text
    """Run folder."""
    status: Text
    """`completed`, `interrupted` or `failed`."""
    strategy: Text
    world_size: Count
    """Number of processes, as in torchrun."""
    num_devices: Count
    """Number of devices that computed; greater than `world_size` for `dp` and `balanced_dp`."""
    device: Text
    precision: Text
    steps: Count
    samples: Count
    epochs: Number
    final_loss: Number | None
    """Mean training loss over the global batch of the last step, which varies between steps because it has few samples;
    `rows` has the mean of each epoch."""
    metrics: dict[Text, Metric]
    """Metrics of the last evaluation."""
    best: dict[Text, Any] | None
    """Best evaluation: `metric`, `value`, `samples_seen`, `checkpoint`."""
    wall_seconds: Number
    """Seconds of training and evaluation over all attempts, without start-up."""
    samples_per_second: Number
    """Training samples per second of training (without evaluation and checkpoints)."""
    seconds: dict[Text, Number] = field(default_factory=dict)
    """Seconds of rank 0 by activity: data, forward and backward (forward_backward if they cannot be told apart), sync,
    optimizer, evaluation, checkpoint, other.
    """
    rows: list[EpochRow] = field(default_factory=list)
    not_preserved: list[Text] = field(default_factory=list)
    """Properties of the one-device run that the strategy, as used here, does not preserve."""
    message: Text | None = None
    """Reason why the run ended early; None if it did not."""
    restarts: Count = 0
    """Number of times that all ranks were restarted after a failure."""
    microbatch_size: Count | None = None
    """Final number of samples that a device computed at once, if memory was exhausted with more; None otherwise."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, found: object) -> "RunSummary":
        """Return a summary from a result of `to_json`, of this version of dure or another.

        Raises:
            DocumentInvalid: It is not a summary.
        """
        return checked(_SUMMARY, found, VERSION)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptSummary:
    """Summary of a script's run: `summary.json`."""

    status: Text
    """`completed`, `interrupted` or `failed`."""
    world_size: Count
    wall_seconds: Number
    message: Text | None
    """Reason why the run ended early; None if it did not."""

    def to_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        return {"version": VERSION, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnd:
    """End of a run in brief, from the summary of a task's or a script's run; None for values that it lacks."""

    status: Text
    """`completed`, `interrupted` or `failed`."""
    message: Text | None = None
    strategy: Text | None = None
    world_size: Count | None = None
    num_devices: Count | None = None
    samples: Count | None = None
    best: dict[Text, Text | Number | None] | None = None
    attempts: Count | None = None
    """Number of the attempt that it ended."""

    @classmethod
    def from_json(cls, found: object) -> "RunEnd":
        """Return the end of a run from its summary's `to_json`, of this version of dure or another.

        Raises:
            DocumentInvalid: It is not a summary.
        """
        return checked(_END, found, VERSION)


_STEP = TypeAdapter(StepRecord)
_SUMMARY = TypeAdapter(RunSummary)
_END = TypeAdapter(RunEnd)


def step_line(r: StepRecord) -> str:
    """Return a step as a line of JSON, without the fields that are None."""
    # formatted by hand: json.dumps of a dict takes three times as long
    samples = "" if r.samples is None else f', "samples": {json.dumps(r.samples)}'
    measured = "" if r.measured is None else f', "measured": {json.dumps(r.measured)}'
    backward = "" if r.backward_seconds is None else f', "{BACKWARD}": {r.backward_seconds:.7f}'
    return (
        f'{{"version": {VERSION}, "time": {r.time:.6f}, "step": {r.step}, "epoch": {r.epoch}, '
        f'"samples_seen": {r.samples_seen}, "loss_sum": {r.loss_sum!r}, "loss_count": {r.loss_count!r}, '
        f'"data_seconds": {r.data_seconds:.7f}, "forward_backward_seconds": {r.forward_backward_seconds:.7f}, '
        f'"sync_seconds": {r.sync_seconds:.7f}, "optimizer_seconds": {r.optimizer_seconds:.7f}, '
        f'"wall_seconds": {r.wall_seconds:.7f}, "sent_bytes": {r.sent_bytes}{backward}{samples}{measured}}}\n'
    )


def step_from_json(found: Mapping[str, Any]) -> StepRecord:
    """Return a step from a parsed line of `step_line`, of this version of dure or another.

    Raises:
        DocumentInvalid: It is not a step.
    """
    known = {name: found[name] for name in StepRecord._fields if name in found}
    return checked(_STEP, known, VERSION)
