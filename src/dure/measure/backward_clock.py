"""Time of a step that is spent in backward, apart from the forward."""

from collections.abc import Sequence

from dure.measure.step_clock import Mark, StepClock


class BackwardClock:
    """Observer of the backwards of a step, each of which it marks at its begin and end."""

    is_over = False

    def __init__(self, clock: StepClock) -> None:
        """Mark by the clock of the steps."""
        self._mark = clock.mark
        self._marks: list[Mark] = []

    def begin(self) -> None:
        """Mark the begin of a backward."""
        self._marks.append(self._mark())

    def end(self) -> None:
        """Mark its end."""
        self._marks.append(self._mark())

    def take(self) -> list[Mark]:
        """Return the marks since the last call: begin and end of each backward."""
        marks, self._marks = self._marks, []
        return marks


def backward_seconds(marks: Sequence[Mark]) -> float | None:
    """Return the seconds of marked backwards, which the device has passed; None if there was none."""
    if not marks:
        return None
    pairs = zip(marks[::2], marks[1::2], strict=True)
    return sum(StepClock.span(begin, end) for begin, end in pairs)
