"""Model of which one section is computed: the model's own `forward` runs, and blocks of other sections are skipped.

Nothing is traced or rewritten. Every section has the batch, so that the model's own code between the blocks (masks,
positions, reshaping) computes the same as always. A block of an earlier section returns a placeholder of its output's
shape, the last of them the received value; the pass ends after the section's last block. `trace` has verified that
nothing else is needed from earlier sections.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.strategies.sections.cuts import find_blocks
from dure.strategies.sections.plan import CURE, SectionPlan
from dure.strategies.sections.values import Description, describe, rebuilt
from dure.torchcompat.compilation import without_compilation
from dure.torchcompat.modules import module_call, replace_module_call


class _SectionEnd(BaseException):
    """End of the model's forward pass after a section's last block; no model catches it."""

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
    """Runner of one section of a model at a time."""

    def __init__(
        self,
        model: nn.Module,
        plan: SectionPlan,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
        whole: Callable[[Any], Any] | None = None,
    ) -> None:
        """Intercept the call of every block; outside a pass the interceptor does nothing.

        Args:
            model: Whole model, of which this rank may have some blocks only.
            plan: Calls of blocks, and their sections.
            computing: Context in which the blocks compute.
            whole: Function from a block's output to its whole values, where ranks divide them; None where none do.
        """
        self.model = model
        self.plan = plan
        self._computing = computing
        self._whole = whole
        self._pass: _Pass | None = None
        blocks = find_blocks(model) if plan.calls else {}
        self._undo = [
            replace_module_call(block, partial(self._call, name, module_call(block))) for name, block in blocks.items()
        ]

    def close(self) -> None:
        """Remove the interceptors."""
        for undo in self._undo:
            undo()

    def run(
        self, bounds: tuple[int, int | None], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, received: Any,
        known: list[Description], device: torch.device,
    ) -> Any:  # fmt: skip
        """Compute one section.

        Args:
            bounds: Its first call, and the call after its last; None continues to the end of the model's `forward`.
            args: Positional arguments of the call of the model.
            kwargs: Keyword arguments of the call.
            received: Output of the block before the first call.
            known: Descriptions of the output of each call, at least of those before the first.
            device: Device of placeholders.

        Returns:
            The output of the section's last block, or of the model.
        """
        return self._run(bounds, args, kwargs, received, known, device, is_learning=False)[0]

    def learn(
        self, bounds: tuple[int, int | None], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, received: Any,
        known: list[Description], device: torch.device,
    ) -> tuple[Any, Any, list[Description]]:  # fmt: skip
        """Compute one section, as `run`.

        Returns:
            The output of the section's last block, or of the model; the output of the last block of all, if it was
            called; and a description of the output of each call of the section.
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
            with without_compilation(), self._computing():  # compiled code would call all blocks
                value = self.model(*args, **kwargs)
        except _SectionEnd as reached:
            value = reached.value
        finally:
            self._pass = None
        return value, now.last, now.learned

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of a block's call; of a skipped block not even the hooks run."""
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
        if self._whole is not None and now.position in (now.end, len(calls)):
            output = self._whole(output)
        if now.is_learning:
            now.learned.append(describe(output, name))
            now.last = output if now.position == len(calls) else None
        if now.position == now.end:
            raise _SectionEnd(output)
        return output


def placeholder(device: torch.device, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return a NaN placeholder for a shape: any use of its values propagates and is detected."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full(shape, value, dtype=dtype, device=device)
