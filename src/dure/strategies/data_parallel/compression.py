"""Compression of gradients between ranks: half precision, int8, top-k, low rank.

Every algorithm except PowerSGD is a function on one flat vector, so that it serves both DDP's buckets (as a
communication hook) and the buckets of `ring_ddp`. A lossy one keeps its error and adds it to the next step's gradient
(error feedback, Seide et al. 2014; Karimireddy et al. 2019), without which top-k never catches up.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.errors import SpecInvalid
from dure.torchcompat.collectives import all_gather_single

BLOCK_ELEMENTS = 1024
"""Elements that share one int8 scale."""

_RESIDUAL = "residual."
"""Prefix of a residual's name in a checkpoint; the number of its bucket follows."""

UNIT = "unit"
"""Name of `Compression.unit` in a checkpoint."""

NEEDS_STABLE_SCALE = ("topk", "int8", "powersgd")
"""Compressions that carry an error over to the next step."""


class StepSums:
    """Totals of a step's compression over its buckets."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.saved_bytes = 0
        self.squared_error: Tensor | float = 0.0
        self.squared_norm: Tensor | float = 0.0

    def measured(self) -> dict[str, float]:
        """Return saved bytes and the relative error for the step's record; waits for an accelerator."""
        squared_norm = float(self.squared_norm)
        error = math.sqrt(float(self.squared_error) / squared_norm) if squared_norm else 0.0
        return {"saved_bytes": float(self.saved_bytes), "compression_error": error}


class Compression(ABC):
    """Algorithm that reduces one flat vector to its mean over all ranks and sends less than the vector."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.step = StepSums()
        self.measures_error = True
        """True if the error of each step is computed for its record."""
        self.unit: float | None = None
        """Divisor of the losses of the last reduced gradients; None for means, whose divisor is constant."""

    def begin_step(self, unit: float | None = None) -> None:
        """Reset the measurements of the last step.

        Args:
            unit: Divisor of this step's losses, a power of two; None for means, and while it is unknown.
        """
        self.step = StepSums()
        if unit is not None and self.unit is not None and unit != self.unit:
            self._rescale(self.unit / unit)

    def measured(self, device: torch.device) -> "dict[str, float] | Callable[[], dict[str, float]]":
        """Return the step's savings and error; on an accelerator a function that reads them later."""
        if not self.measures_error:
            return {"saved_bytes": float(self.step.saved_bytes)}
        return self.step.measured() if device.type == "cpu" else self.step.measured

    def _rescale(self, factor: float) -> None:
        """Multiply the state that is carried over, because the divisor of the losses has changed."""

    def undo_step(self) -> None:
        """Discard the current step's reduction: it changes no weights, so its errors must not be carried over."""
        self.step.squared_error = self.step.squared_norm = 0.0

    def reduce_mean(self, vector: Tensor, key: int) -> None:
        """Replace a vector by its approximate mean over all ranks; bitwise identical on every rank.

        Args:
            vector: (N,), this rank's gradients.
            key: Number of the bucket, the same on every rank and in every step.
        """
        self.note_sent(self._reduce(vector, key), vector)

    def note_sent(self, sent: int, vector: Tensor) -> None:
        """Count the bytes sent in place of a vector."""
        plain = 2 * (self.world_size - 1) * vector.numel() * vector.element_size() // self.world_size
        self.step.sent_bytes += sent
        self.step.saved_bytes += plain - sent

    def note_error(self, wanted: Tensor, error: Tensor) -> None:
        """Record the vector to be sent, and the part of it that was not sent, if errors are measured."""
        if not self.measures_error:
            return
        # tensors: reading them here would stall an accelerator in the middle of backward
        self.step.squared_norm = self.step.squared_norm + wanted.square().sum()
        self.step.squared_error = self.step.squared_error + error.square().sum()

    @abstractmethod
    def _reduce(self, vector: Tensor, key: int) -> int:
        """Reduce the vector, and return the bytes that this rank sent."""

    def rank_state(self) -> dict[str, Tensor]:
        """Return the state that this rank must keep to continue as if never interrupted."""
        return {}

    def load_rank_state(self, state: dict[str, Tensor]) -> None:
        """Load this state."""


class Cast(Compression):
    """Half precision: values divided by the world size (so that the sum cannot overflow), cast, added, cast back."""

    def __init__(self, process_group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        super().__init__(process_group)
        self._dtype = dtype

    def _reduce(self, vector: Tensor, key: int) -> int:
        """Communication: one all_reduce of N halves, 2 (P-1)/P 2N bytes from each rank."""
        scaled = vector / self.world_size
        sent = scaled.to(self._dtype)
        if self.measures_error:
            self.note_error(scaled, scaled - sent)
        dist.all_reduce(sent, group=self.process_group)
        vector.copy_(sent)
        return 2 * (self.world_size - 1) * sent.numel() * sent.element_size() // self.world_size


class WithFeedback(Compression):
    """Compression that keeps the part of the vector that this rank did not send, and adds it to the next step's."""

    def __init__(self, process_group: dist.ProcessGroup | None, *, can_undo: bool = False) -> None:
        """Start without residuals.

        Args:
            process_group: Group whose ranks reduce.
            can_undo: Keep the residuals from before a step until the next one begins, at the cost of their memory.
        """
        super().__init__(process_group)
        self.residuals: dict[int, Tensor] = {}
        self._can_undo = can_undo
        self._before: dict[int, Tensor] = {}

    def begin_step(self, unit: float | None = None) -> None:
        """Keep the residuals for `undo_step`; no residual is ever changed in place."""
        super().begin_step(unit)
        if self._can_undo:
            self._before = dict(self.residuals)

    def _rescale(self, factor: float) -> None:
        self.residuals = {key: residual * factor for key, residual in self.residuals.items()}

    def undo_step(self) -> None:
        """Restore the residuals from before the step."""
        super().undo_step()
        assert self._can_undo, "a step can only be undone if the residuals from before it were kept"
        self.residuals = dict(self._before)

    def _wanted(self, vector: Tensor, key: int) -> Tensor:
        residual = self.residuals.get(key)
        if residual is None or residual.shape != vector.shape:
            return vector.clone()
        return vector + residual.to(vector.device)  # a residual from a checkpoint is in host memory

    def _keep(self, key: int, wanted: Tensor, residual: Tensor) -> None:
        self.note_error(wanted, residual)
        self.residuals[key] = residual

    def rank_state(self) -> dict[str, Tensor]:
        """Return the residuals, and the unit of the losses from which they result."""
        residuals = {f"{_RESIDUAL}{key}": residual for key, residual in self.residuals.items()}
        return residuals if self.unit is None else {**residuals, UNIT: torch.tensor(self.unit, dtype=torch.float64)}

    def load_rank_state(self, state: dict[str, Tensor]) -> None:
        """Load residuals; those of another compression, or another strategy, are ignored."""
        own = {name: tensor for name, tensor in state.items() if name.startswith(_RESIDUAL)}
        self.residuals = {int(name.removeprefix(_RESIDUAL)): tensor.clone() for name, tensor in own.items()}
        self.unit = float(state[UNIT]) if UNIT in state else None

    def _gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's tensor, `(P, ...)` by rank."""
        gathered = tensor.new_empty((self.world_size * tensor.numel(),))
        all_gather_single(gathered, tensor.view(-1), self.process_group)
        return gathered.view(self.world_size, *tensor.shape)


class TopK(WithFeedback):
    """Elements of the largest magnitude, with their indices (Aji and Heafield 2017)."""

    def __init__(self, process_group: dist.ProcessGroup | None, fraction: float, *, can_undo: bool = False) -> None:
        super().__init__(process_group, can_undo=can_undo)
        self._fraction = fraction

    def _reduce(self, vector: Tensor, key: int) -> int:
        """Communication: two all_gather, of k values and k indices (int32), (P-1) k (4 + element) bytes from each."""
        wanted = self._wanted(vector, key)
        k = max(1, math.ceil(self._fraction * wanted.numel())) if wanted.numel() else 0
        places = wanted.abs().topk(k, sorted=False).indices.to(torch.int32)
        values = wanted[places]
        residual = wanted.clone()
        residual[places] = 0
        self._keep(key, wanted, residual)
        vector.zero_()
        # one rank after the other: the order of addition is the same on all ranks
        for theirs, where in zip(self._gather(values), self._gather(places), strict=True):
            vector.index_add_(0, where, theirs)
        vector.div_(self.world_size)
        return (self.world_size - 1) * k * (4 + vector.element_size())


class Int8(WithFeedback):
    """Eight bits per element and one scale per block (Dettmers 2016)."""

    def _reduce(self, vector: Tensor, key: int) -> int:
        """Communication: two all_gather, (P-1) (N + 4 ceil(N/1024)) bytes from each rank."""
        wanted = self._wanted(vector, key)
        blocks = _in_blocks(wanted)
        scales = (blocks.abs().amax(1, keepdim=True) / 127).to(torch.float32)
        # a block of zeros has no scale
        scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
        codes = scaled.round().clamp(-127, 127).to(torch.int8).view(-1)[: wanted.numel()]
        self._keep(key, wanted, wanted - self._decoded(codes, scales, wanted))
        vector.zero_()
        for theirs, their_scales in zip(self._gather(codes), self._gather(scales), strict=True):
            vector.add_(self._decoded(theirs, their_scales, vector))
        vector.div_(self.world_size)
        return (self.world_size - 1) * (codes.numel() + 4 * scales.numel())

    @staticmethod
    def _decoded(codes: Tensor, scales: Tensor, like: Tensor) -> Tensor:
        return (_in_blocks(codes).to(like.dtype) * scales.to(like.dtype)).view(-1)[: like.numel()]


def _in_blocks(vector: Tensor) -> Tensor:
    return nn.functional.pad(vector, (0, -vector.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)


def open_compression(
    name: str, process_group: dist.ProcessGroup | None, *, fraction: float, can_undo: bool
) -> Compression:
    """Create a compression by name.

    Args:
        name: `fp16`, `bf16`, `topk` or `int8`.
        process_group: Group whose ranks reduce.
        fraction: Fraction of the elements that `topk` sends.
        can_undo: Whether steps may be skipped, see `Compression.undo_step`.
    """
    if name in ("fp16", "bf16"):
        return Cast(process_group, torch.float16 if name == "fp16" else torch.bfloat16)
    if name == "topk":
        return TopK(process_group, fraction, can_undo=can_undo)
    return Int8(process_group, can_undo=can_undo)


def check_compression(name: str | None, model: nn.Module, scales_loss: bool) -> None:
    """Refuse a model or a precision that a compression does not support.

    Raises:
        SpecInvalid: fp16's loss scale changes between steps; PowerSGD does not support parameters of one element.
    """
    if name in NEEDS_STABLE_SCALE and scales_loss:
        raise SpecInvalid(
            [
                f"compression is {name} and precision fp16: the error that is carried to the next step would be of "
                "another loss scale; use --precision bf16, or the compression fp16"
            ]
        )
    scalars = [n for n, p in model.named_parameters() if p.requires_grad and p.dim() == 0]
    if name == "powersgd" and scalars:
        raise SpecInvalid(
            [
                f"compression is powersgd but {scalars[0]} is a parameter of one number, which is no matrix: give it a "
                "dimension, or use the compression topk"
            ]
        )
