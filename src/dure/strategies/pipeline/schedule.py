"""Pipeline schedules of torch: their stages, timed, and the number of microbatches that each schedule needs.

GPipe (Huang et al. 2019, section 2.3): all forwards, then all backwards. 1F1B (Narayanan et al. 2019, section 3.2;
2021, section 2.2.1): as soon as a stage can, it does one backward for one forward, so that it holds the activations of
at most P microbatches. Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): V stages on every rank, and a bubble V
times smaller for V times the messages. With M microbatches on P ranks the idle fraction is (P-1)/(V M + P-1).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from dure.measure.step_clock import StepClock
from dure.strategies.sections.values import Lanes, lane_dtype

Compute = Callable[[int, int, tuple[Tensor, ...]], "Tensor | tuple[Tensor, ...]"]
"""Function from stage, microbatch and received buffers to the buffers to send; for the last stage, a float64 scalar."""


class _Section(nn.Module):
    """Module of a stage, in the form that torch's stages need."""

    def __init__(self, compute: Compute, index: int) -> None:
        super().__init__()
        self._compute = compute
        self._index = index

    def forward(self, *buffers: Tensor, microbatch: Tensor) -> Any:
        """Compute a microbatch, identified by its number `(1,)`."""
        return self._compute(self._index, int(microbatch), buffers)


class TimedStage(PipelineStage):
    """Stage that records when it starts and ends to compute."""

    def __init__(self, *args: Any, clock: StepClock, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = clock
        self.marks: list[Any] = []

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a forward pass, timed."""
        self.marks.append(self.clock.mark())
        try:
            return super().forward_one_chunk(*args, **kwargs)
        finally:
            self.marks.append(self.clock.mark())

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a backward pass, timed."""
        self.marks.append(self.clock.mark())
        try:
            return super().backward_one_chunk(*args, **kwargs)
        finally:
            self.marks.append(self.clock.mark())


def num_scheduled(schedule: str, num_microbatches: int, num_ranks: int, num_stages: int) -> int:
    """Return the number of microbatches that a schedule runs for `num_microbatches`; the additional ones are empty.

    1F1B needs one for every stage, and interleaved 1F1B the same number in each round through the ranks.
    """
    if schedule == "gpipe":
        return num_microbatches
    if schedule == "1f1b":
        return max(num_microbatches, num_stages)
    number = num_microbatches
    while number % max(1, number // num_ranks):
        number += 1
    return number


@dataclass(kw_only=True)
class Schedule:
    """Schedule of torch for a number of microbatches and for buffers of certain sizes."""

    engine: Any
    stages: list[TimedStage]
    num_microbatches: int
    clock: StepClock
    span: tuple[Any, ...] = ()
    """Marks at the start and the end of the last run."""

    @classmethod
    def build(
        cls, name: str, compute: Compute, sections: Sequence[int], lanes: Sequence[Lanes], num_microbatches: int, *,
        device: torch.device, group: dist.ProcessGroup, clock: StepClock,
    ) -> "Schedule":  # fmt: skip
        """Create the stages of this rank and their schedule.

        All shapes are given, so that torch neither tries the model nor sends pickled descriptions of tensors.

        Args:
            name: `gpipe`, `1f1b` or `interleaved`.
            compute: Function that computes a stage.
            sections: Stages of this rank, ascending.
            lanes: Buffers over each cut, one fewer than there are stages.
            num_microbatches: A result of `num_scheduled`.
            device: Device of the buffers.
            group: Ranks of the pipeline.
            clock: Clock for the marks.
        """
        num_stages = len(lanes) + 1

        def buffers(lane_sizes: Lanes) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty(size, dtype=lane_dtype(lane), device="meta", requires_grad=True)
                for lane, size in lane_sizes.items()
            )

        stages = [
            TimedStage(
                _Section(compute, section), section, num_stages, device,
                input_args=buffers(lanes[section - 1]) if section else (),
                output_args=(
                    buffers(lanes[section])
                    if section < num_stages - 1
                    else (torch.empty((), dtype=torch.float64, device="meta", requires_grad=True),)
                ),
                group=group, clock=clock,
            )
            for section in sections
        ]  # fmt: skip
        # losses are weighted by dure; dividing by the number of microbatches would make a mean of means
        settings: dict[str, Any] = {"n_microbatches": num_microbatches, "loss_fn": _as_it_is, "scale_grads": False}
        engine: Any
        if name == "interleaved":
            engine = ScheduleInterleaved1F1B(list(stages), **settings)
        else:
            engine = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stages[0], **settings)
        return cls(engine=engine, stages=stages, num_microbatches=num_microbatches, clock=clock)

    def run(self) -> None:
        """Compute all microbatches, forward and backward.

        Communication: per microbatch and cut the buffers forward and their gradients back, point to point.
        """
        for stage in self.stages:
            stage.marks.clear()
        numbers = torch.arange(self.num_microbatches)
        is_last = self.stages[-1].is_last
        self.span = (self.clock.mark(),)
        self.engine.step(
            microbatch=numbers,
            target=numbers if is_last else None,
            losses=[] if is_last else None,
            return_outputs=False,
        )
        for stage in self.stages:
            stage.clear_runtime_states()  # otherwise gradients of received buffers would live until the next step

    def end(self) -> None:
        """Mark the time at which the stages of all ranks are done."""
        self.span = (self.span[0], self.clock.mark())

    def bubble(self) -> Callable[[], dict[str, float]]:
        """Return a function that returns the idle fraction of the last run; it waits for the device."""
        marks = [list(stage.marks) for stage in self.stages]
        span, clock = self.span, self.clock

        def measured() -> dict[str, float]:
            whole = clock.spans(span)[0]
            busy = sum(sum(clock.spans(of_stage)[::2]) for of_stage in marks)
            return {"bubble_fraction": max(0.0, 1.0 - busy / whole) if whole > 0 else 0.0}

        return measured


def _as_it_is(output: Tensor, target: Tensor) -> Tensor:
    # the last stage computes the task's loss itself
    return output
