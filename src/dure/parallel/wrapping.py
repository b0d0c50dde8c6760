"""Checks and messages that the wrappers over several ranks have in common."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.comm.groups import Group
from dure.errors import EnvironmentLacks, TaskInvalid


def only_device(module: nn.Module, parameters: list[nn.Parameter], wrapper: str) -> torch.device:
    """Return the device of a model.

    Args:
        module: Model.
        parameters: Those that are trained.
        wrapper: Name for messages.

    Raises:
        TaskInvalid: It has several, no trained parameters, parameters without a shape, or sparse gradients.
    """
    if not parameters:
        raise TaskInvalid(f"{wrapper} has nothing to average: no parameter of the model requires a gradient")
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in module.parameters()):
        raise TaskInvalid(f"{wrapper} needs parameters with a shape: call the lazy model on a batch before you wrap it")
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1:
        raise TaskInvalid(
            f"{wrapper} takes a model on one device, and this one is on {', '.join(sorted(map(str, devices)))}: move "
            "it to one first"
        )
    sparse = [name for name, each in module.named_modules() if getattr(each, "sparse", False) is True]
    if sparse:
        raise TaskInvalid(
            f"{sparse[0]} gives sparse gradients (sparse=True), which have no place in a flat buffer: use torch's DDP"
        )
    return devices.pop()


def check_alike(group: Group, module: nn.Module, wrapper: str) -> None:
    """Refuse models that are not the same on all ranks, before anything is sent.

    Raises:
        TaskInvalid: A rank has other parameters or buffers.

    Communication: one gathered JSON message.
    """
    own = [
        [name, f"{kind} of {tuple(each.shape)}, {each.dtype}{', trained' if each.requires_grad else ''}"]
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, each in tensors
    ]
    for rank, other in enumerate(group.all_gather_json(own)):
        if other != own:
            first, second = (dict(each) for each in (own, other))
            name = next((each for each in [*first, *second] if first.get(each) != second.get(each)), own[0][0])
            raise TaskInvalid(
                f"{wrapper} needs the same model on all ranks: {name} is a {first.get(name, 'name without a tensor')} "
                f"on rank {group.rank}, and a {second.get(name, 'name without a tensor')} on rank {rank}"
            )


class RankWrapper(nn.Module):
    """Module around a model, on each of several ranks.

    A copy, also a pickled one, can be called and not trained: it has no connection to other ranks.
    """

    _of_rank: ClassVar[frozenset[str]] = frozenset()
    """Attributes that no copy has."""
    _is_copy = False

    def __init__(self, module: nn.Module) -> None:
        """Take a model.

        Raises:
            EnvironmentLacks: There is no process group yet.
        """
        super().__init__()
        if not (dist.is_available() and dist.is_initialized()):
            raise EnvironmentLacks(
                f"{type(self).__name__} needs a process group: call torch.distributed.init_process_group first"
            )
        self.module = module
        self._synchronises = True
        self._is_open = True
        """False once it is closed, and on a copy."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of this rank alone; the next backward outside sends them too."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        state = {name: value for name, value in self.__dict__.items() if name not in self._of_rank}
        return {**state, "_is_open": False, "_is_copy": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which refuses to be trained."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_refuse_training_of_copy)


class Trained:
    """Parameters that a wrapper reduces, as they were when the model was wrapped."""

    def __init__(self, module: nn.Module, wrapper: str) -> None:
        """Note the parameters that require a gradient."""
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._wrapper = wrapper
        self._kinds = {id(each): (each.dtype, each.device) for each in self.parameters}

    def check(self, module: nn.Module) -> None:
        """Refuse a model with others, whose gradients would stay those of one rank.

        Raises:
            TaskInvalid: A parameter is new, was unfrozen, or has another dtype or device.
        """
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and self._kinds.get(id(parameter)) != (parameter.dtype, parameter.device):
                raise TaskInvalid(
                    f"{name} was added, unfrozen or moved to another dtype or device after the model was wrapped, so "
                    f"{self._wrapper} does not reduce it: call close(), and wrap the model again on all ranks"
                )


def _refuse_training_of_copy(parameter: nn.Parameter) -> None:
    """Refuse a backward of a copied wrapper, as a hook on its parameters.

    Raises:
        TaskInvalid: Always.
    """
    raise TaskInvalid(
        "a copy of a wrapper has no connection to other ranks, so it can be called but not trained: wrap the copy's "
        "module on all ranks"
    )


def send_tensors(group: Group, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors with those of the group's first rank, without a trace in autograd's version counters.

    Communication: one broadcast for each dtype and device.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.data)
    for parts in kinds.values():
        flat = torch.cat([part.reshape(-1) for part in parts])
        group.broadcast([flat])
        if group.rank:
            for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(values.view_as(part))
