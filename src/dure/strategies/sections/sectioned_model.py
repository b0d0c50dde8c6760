"""A model of which one section is computed: the model's own `forward` runs, and blocks of other sections are skipped.

Nothing is traced or rewritten. Every section has the batch, so that the model's own code between the blocks (masks,
positions, reshaping) computes what it always does. A block of an earlier section answers with a placeholder of its
output's shape, the last of them with the value that was received; after the section's last block the pass ends. That
nothing else is needed from earlier sections is what `trace` has made sure of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.strategies.sections.cuts import find_blocks
from dure.strategies.sections.plan import CURE, SectionPlan
from dure.strategies.sections.values import Description, describe, rebuilt
from dure.torchcompat import module_call, replace_module_call


class _SectionEnd(BaseException):
    """Ends the model's forward pass after a section's last block; nothing that a model catches."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@dataclass(slots=True)
class _Pass:
    begin: int
    end: int
    received: Any
    known: list[Description]
    device: torch.device
    is_learning: bool
    position: int = 0
    last: Any = None
    learned: list[Description] = field(default_factory=list)


class SectionedModel:
    """Runs one section of a model at a time."""

    def __init__(self, model: nn.Module, plan: SectionPlan) -> None:
        """Put a switch into the call of every block; without a pass it does nothing."""
        self.model = model
        self.plan = plan
        self._pass: _Pass | None = None
        blocks = find_blocks(model) if plan.calls else {}
        self._undo = [
            replace_module_call(block, partial(self._call, name, module_call(block))) for name, block in blocks.items()
        ]

    def close(self) -> None:
        """Take the switches out again."""
        for undo in self._undo:
            undo()

    def run(
        self, bounds: tuple[int, int | None], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, received: Any,
        known: list[Description], device: torch.device,
    ) -> Any:  # fmt: skip
        """Compute one section.

        Args:
            bounds: Its first call, and the call after its last; None goes on to the end of the model's `forward`.
            args: Of the call of the model.
            kwargs: The same.
            received: What the block before the first call gave.
            known: Descriptions of what each call gives, at least of those before the first.
            device: Of placeholders.

        Returns:
            What the section's last block gave, or the model.
        """
        return self._run(bounds, args, kwargs, received, known, device, is_learning=False)[0]

    def learn(
        self, bounds: tuple[int, int | None], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, received: Any,
        known: list[Description], device: torch.device,
    ) -> tuple[Any, Any, list[Description]]:  # fmt: skip
        """Compute one section, as `run`.

        Returns:
            What the section's last block gave, or the model; what the last block of all gave, if it was called; and a
            description of what each call of the section gave.
        """
        return self._run(bounds, args, kwargs, received, known, device, is_learning=True)

    def _run(
        self, bounds: tuple[int, int | None], args: tuple[Any, ...], kwargs: Mapping[str, Any], received: Any,
        known: list[Description], device: torch.device, *, is_learning: bool,
    ) -> tuple[Any, Any, list[Description]]:  # fmt: skip
        begin, end = bounds
        now = _Pass(
            begin=begin, end=-1 if end is None else end, received=received, known=known, device=device,
            is_learning=is_learning,
        )  # fmt: skip
        self._pass = now
        try:
            value = self.model(*args, **kwargs)
        except _SectionEnd as reached:
            value = reached.value
        finally:
            self._pass = None
        return value, now.last, now.learned

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Answer a block's call; of a skipped block not even the hooks run."""
        now = self._pass
        if now is None:
            return call(*args, **kwargs)
        calls = self.plan.calls
        expected = calls[now.position] if now.position < len(calls) else "nothing more"
        if expected != name:
            raise TaskInvalid(
                f"{type(self.model).__name__} called {name} where {expected} was called on the first samples: a model "
                f"that is cut into sections must call its blocks in one order, whatever the batch; use {CURE}"
            )
        now.position += 1
        if now.position <= now.begin:
            if now.position == now.begin:
                return now.received
            return rebuilt(now.known[now.position - 1], partial(placeholder, now.device))
        output = call(*args, **kwargs)
        if now.is_learning:
            now.learned.append(describe(output, name))
            now.last = output if now.position == len(calls) else None
        if now.position == now.end:
            raise _SectionEnd(output)
        return output


def placeholder(device: torch.device, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return a tensor that is only looked at for its shape: of NaN, so that a use of its values would be heard."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full(shape, value, dtype=dtype, device=device)
