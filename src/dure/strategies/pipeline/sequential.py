"""Sequential passes through all stages, for evaluations and to find the shapes of the exchanged values."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dure.comm.mesh import Mesh
from dure.data.randomness import kept_global_randomness
from dure.errors import TaskInvalid
from dure.strategies.contract.batches import own_copy
from dure.strategies.contract.precision import Precision
from dure.strategies.sections.own_part import LocalStages
from dure.strategies.sections.sectioned_model import SectionedModel
from dure.strategies.sections.trace import kept_buffers, tensors_of
from dure.strategies.sections.values import Description, describe, lane_dtype, lanes_of, packed, unpacked

_MOST_KNOWN = 256
"""Maximum number of batch signatures whose shapes are cached."""


class Sweeps:
    """Runner that sends one batch at a time through the stages. All ranks of a pipeline call it with the same batch.

    Shapes are found once for each signature of a batch: a stage runs on the real values and sends the others
    descriptions of its blocks' outputs in JSON. torch's own inference would run the stages on zeros and send pickled
    descriptions.
    """

    def __init__(
        self, sections: SectionedModel, part: LocalStages, mesh: Mesh, device: torch.device, precision: Precision
    ) -> None:
        self._sections = sections
        self._part = part
        self._ranks = mesh.group("pipeline")
        self._mesh = mesh
        self._num_stages = len(sections.plan.begins)
        self._device = device
        self._precision = precision
        self._anchor = torch.zeros((), device=device)
        self._known: dict[Any, list[Description]] = {}
        self._handed: dict[Any, tuple[str, Description]] = {}

    def known(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Description]:
        """Return descriptions of each block's output for a batch of these shapes.

        Communication: for new shapes, per stage one gathered JSON message, about 50 bytes per block, and the
        activations over each cut.
        """
        key = self._key(args, kwargs)
        if key not in self._known:
            with torch.no_grad(), kept_buffers(self._sections.model, self._part.is_here):
                self._sweep(*own_copy((args, kwargs)), spare=(args, kwargs), to_end=False)
        return self._known[key]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output on every rank.

        An output of tensors in plain containers is sent as it is. For any other, the last block's output is sent, and
        every rank runs the rest of the model: so the output has the model's own type, whatever that is.

        Communication: per cut the activations, point to point; one broadcast of the output.

        Raises:
            TaskInvalid: The output can be sent in neither way.
        """
        if self._num_stages == 1:
            return self._sections.model(*args, **kwargs)
        key, owner = self._key(args, kwargs), (self._num_stages - 1) % self._ranks.world_size
        spare = own_copy((args, kwargs))
        output, last = self._sweep(args, kwargs, spare=spare, to_end=True)
        if key not in self._handed:
            described = self._output_or_block(output, self._known[key][-1]) if self._ranks.rank == owner else None
            self._handed[key] = self._ranks.all_gather_json(described)[owner]
        kind, description = self._handed[key]
        own = output if kind == "output" else last
        lanes = lanes_of([description])
        name = "the model" if kind == "output" else self._sections.plan.calls[-1]
        is_owner = self._ranks.rank == owner
        buffers = packed(own, description, lanes, self._anchor, name) if is_owner else self._buffers(lanes)
        self._ranks.broadcast(list(buffers), source_rank=owner)
        if is_owner:
            return output
        received = unpacked(buffers, description, lanes)
        return received if kind == "output" else self._tail(*spare, received=received)

    def _output_or_block(self, output: Any, of_last_block: Description) -> tuple[str, Description]:
        try:
            return "output", describe(output, type(self._sections.model).__name__)
        except TaskInvalid:
            if not self._sections.plan.ends_with_last_block:
                raise
            return "block", of_last_block

    def _tail(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, received: Any) -> Any:
        known, end = self._known[self._key(args, kwargs)], len(self._sections.plan.calls)
        with kept_global_randomness(self._device), self._precision.autocast():
            return self._sections.run((end, None), args, kwargs, received=received, known=known, device=self._device)

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        # outputs for batches of the same shapes may differ between training and evaluation
        return (_signature((args, dict(kwargs))), self._sections.model.training)

    def _sweep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, spare: Any, to_end: bool) -> tuple[Any, Any]:
        """Run all stages in turn; return the model's output and the last block's, on the rank that has them.

        Args:
            args: Positional arguments of the model, which may work in place.
            kwargs: Keyword arguments.
            spare: Equal arguments, of which each further stage of a rank gets a copy.
            to_end: Whether the last stage runs to the end of the model's `forward`.
        """
        key = self._key(args, kwargs)
        known = self._known.get(key)
        learned: list[Description] = [] if known is None else known
        value, last = None, None
        for stage in range(self._num_stages):
            owner = stage % self._ranks.world_size
            bounds = self._sections.plan.bounds(stage)
            end = None if to_end and stage == self._num_stages - 1 else bounds[1]
            descriptions: list[Description] = []
            if stage and owner == self._ranks.rank:
                value = self._receive(learned[bounds[0] - 1], (stage - 1) % self._ranks.world_size)
            if owner == self._ranks.rank:
                given, named = (args, kwargs) if stage < self._ranks.world_size else own_copy(spare)
                with kept_global_randomness(self._device), self._precision.autocast():
                    value, last, descriptions = self._sections.learn(
                        (bounds[0], end), given, named, received=value, known=learned, device=self._device
                    )
            if known is None:
                learned = [*learned, *self._ranks.all_gather_json(descriptions)[owner]]
            if owner == self._ranks.rank and stage < self._num_stages - 1:
                self._send(value, learned[bounds[1] - 1], bounds[1] - 1, (stage + 1) % self._ranks.world_size)
        if known is None:
            while len(self._known) >= _MOST_KNOWN:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._handed.pop(oldest, None)
            self._known[key] = learned
        return value, last

    def _packed(self, value: Any, description: Description, position: int) -> tuple[Tensor, ...]:
        block = self._sections.plan.calls[position]
        return packed(value, description, lanes_of([description]), self._anchor, block)

    def _send(self, value: Any, description: Description, position: int, rank: int) -> None:
        for buffer in self._packed(value, description, position):
            dist.send(buffer, group=self._mesh.process_group("pipeline"), group_dst=rank)

    def _receive(self, description: Description, rank: int) -> Any:
        lanes = lanes_of([description])
        buffers = self._buffers(lanes)
        for buffer in buffers:
            dist.recv(buffer, group=self._mesh.process_group("pipeline"), group_src=rank)
        return unpacked(buffers, description, lanes)

    def _buffers(self, lanes: Mapping[str, int]) -> tuple[Tensor, ...]:
        return tuple(torch.empty(size, dtype=lane_dtype(lane), device=self._device) for lane, size in lanes.items())


def _signature(value: Any) -> Any:
    """Return the features on which a batch's shapes depend, for comparison."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape))
    if isinstance(value, tuple | list):
        return (type(value).__name__, *map(_signature, value))
    if isinstance(value, Mapping):
        return ("mapping", *((str(key), _signature(item)) for key, item in value.items()))
    if isinstance(value, bool | int | float | str | type(None)):
        return (type(value).__name__, value)
    return (type(value).__name__, *map(_signature, tensors_of(value)))
