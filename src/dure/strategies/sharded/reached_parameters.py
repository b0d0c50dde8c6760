"""Parameters of a sharded model that backward reaches, by which the unused ones are known."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dure.strategies.contract.batches import map_tensors
from dure.strategies.tensor_parallel.layers import follow_placement
from dure.torchcompat.tensors import own_attributes


class ReachedParameters:
    """Trained parameters to which backward has given a gradient in the current step."""

    def __init__(self, model: nn.Module, trainable: Sequence[nn.Parameter], *, fills_unused: bool) -> None:
        """Watch 0-dim parameters, which stay whole; the others are watched once they are gathered.

        Args:
            model: Sharded model.
            trainable: Its trained parameters.
            fills_unused: Whether backward gives zero gradients to unused parameters of a module that it reaches.
        """
        self._num_trainable = len(trainable)
        self._fills_unused = fills_unused
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._positions = {name: position for position, name in enumerate(names)}
        self._reached: list[Tensor] = []
        """Gathered parameters, and 0-dim ones, that backward has reached in this step."""
        self._position_of: dict[int, int] = {}
        """Position among the trainable parameters, by the id of a tensor in `_reached`."""
        self._gathered: list[Tensor] = []
        """All gathered parameters."""
        self._divided: list[Tensor] = [parameter for parameter in trainable if isinstance(parameter, DTensor)]
        for position, parameter in enumerate(trainable):
            if parameter.dim() == 0:
                self._watch(parameter, position)

    def watch_when_gathered(self, prefix: str, module: nn.Module, sharded: nn.Module) -> None:
        """Watch whole parameters, which exist from the first forward on and stay the same objects.

        Args:
            prefix: Prefix of their names in the model.
            module: Module with the parameters.
            sharded: Module that gathers them.
        """

        def watch(_: nn.Module, inputs: Any) -> None:
            for name, parameter in module.named_parameters():
                vars(parameter).update(attributes.get(name, {}))
                position = self._positions.get(prefix + name)
                if position is not None and not is_sharded(parameter) and parameter.dim():
                    if isinstance(parameter, DTensor):
                        follow_placement(parameter, parameter.placements[0])
                    self._watch(parameter, position)
                    watched.append(parameter)
                    self._gathered.append(parameter)
            handle.remove()

        attributes = {name: own_attributes(p) for name, p in module.named_parameters()}
        watched: list[nn.Parameter] = []
        if self._fills_unused:
            sharded.register_forward_hook(lambda module, inputs, outputs: _fill_in_backward(outputs, watched))

        # hooks run in the order of registration, so fully_shard's has gathered the parameters by then
        handle = sharded.register_forward_pre_hook(watch)

    def _watch(self, parameter: nn.Parameter, position: int) -> None:
        self._position_of[id(parameter)] = position
        parameter.register_post_accumulate_grad_hook(self._reached.append)

    def begin_step(self) -> None:
        """Forget those of the last step."""
        self._reached.clear()

    def used(self, dtype: torch.dtype, device: torch.device) -> tuple[bool, Tensor]:
        """Return whether this rank's backward reached all parameters, and one number for each."""
        reached = {self._position_of[id(parameter)] for parameter in self._reached}
        if len(reached) == self._num_trainable:
            return True, torch.ones(self._num_trainable, dtype=dtype, device=device)
        flags = [float(position in reached) for position in range(self._num_trainable)]
        return False, torch.tensor(flags, dtype=dtype, device=device)

    def increment_versions(self) -> None:
        """Give parameters, gathered or not, another version after a step, as code that caches expects."""
        torch.autograd.graph.increment_version([*self._gathered, *self._divided])


def is_sharded(parameter: Tensor) -> bool:
    """Return whether a parameter is divided over the axis `shard`, and not only over the axis `tensor`."""
    return isinstance(parameter, DTensor) and "shard" in (parameter.device_mesh.mesh_dim_names or ())


def _fill_in_backward(outputs: Any, parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters zero gradients when backward reaches a result computed from some of them."""

    def fill(gradient: Tensor) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    map_tensors(outputs, lambda tensor: tensor.register_hook(fill) if tensor.requires_grad else None)
