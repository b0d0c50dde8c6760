"""A rank's part of a model in sections: its tensors, placeholders for the others, and its part of checkpoints."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.errors import TaskInvalid
from dure.strategies.sections.absent_tensors import hollow, made_absent
from dure.strategies.sections.plan import CURE, SectionPlan
from dure.strategies.state.optimizer import STEP_KEY, group_names, optimizer_to_names
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.strategies.state.tensor_shard import Needs, rectangles
from dure.torchcompat.tensors import give_data


class LocalStages(nn.Module):
    """Tensors of some sections under the whole model's names.

    The model keeps all its modules and names. Parameters of blocks on other ranks are replaced by one NaN expanded to
    their shape. Like buffers of such blocks, they raise on use (`absent_tensors`). Tensors outside the blocks are
    small; every rank has them, and one rank trains each.
    """

    def __init__(self, model: nn.Module, plan: SectionPlan, sections: Iterable[int], device: torch.device) -> None:
        """Release the tensors of other ranks, and move the rest.

        Args:
            model: Whole model.
            plan: Section of each tensor.
            sections: Sections of this rank.
            device: Device of this rank.
        """
        super().__init__()
        self._whole = [model]  # in a list, so that the model is no submodule of its part
        mine = set(sections)
        owners = plan.owners(model)
        blocks = tuple(dict.fromkeys(plan.calls))
        self._in_blocks = tuple(f"{block}." for block in blocks)
        self._in_own_blocks = tuple(f"{block}." for block in blocks if plan.section_of_block(block) in mine)
        self._keeps_rest = 0 in mine
        self.loose = {name: owners[name] for name in sorted(owners) if not name.startswith(self._in_blocks)}
        """Section that keeps each parameter and buffer outside the blocks, by name."""
        self._own_loose = {name for name, section in self.loose.items() if section in mine}
        for name in owners:
            before = _tensor(model, name)
            if isinstance(before, DTensor):  # this rank's part of a tensor of its own, on its device
                continue
            if self.is_here(name):
                _replace(model, name, before.to(device))
            else:
                nothing = hollow(before, device)
                # buffers are copied into when a step is skipped or a rank restarts
                _replace(model, name, nothing if isinstance(before, nn.Parameter) else nothing.clone())
                made_absent(_tensor(model, name), name)
        self._of_others = [(name, parameter) for name, parameter in model.named_parameters() if not self.is_own(name)]

    def is_own(self, name: str) -> bool:
        """Return whether this rank keeps the tensor with this name in the model's state."""
        if name.startswith(self._in_blocks):
            return name.startswith(self._in_own_blocks)
        return name in self._own_loose or (name not in self.loose and self._keeps_rest)

    def is_here(self, name: str) -> bool:
        """Return whether this rank has the tensor with this name in the model's state, whether or not it keeps it."""
        return name in self.loose or self.is_own(name)

    @property
    def whole(self) -> nn.Module:
        """Whole model."""
        return self._whole[0]

    def trainable(self) -> list[nn.Parameter]:
        """Return this rank's trained parameters."""
        return [p for name, p in self.whole.named_parameters() if self.is_own(name) and p.requires_grad]

    def refuse_lost_gradients(self, found: Iterable[Tensor] | None = None) -> None:
        """Refuse gradients of parameters that another rank trains.

        Args:
            found: Tensors that have a gradient; those with `.grad` by default.

        Raises:
            TaskInvalid: Names the parameter; no rank would add its gradient to the others.
        """
        have = None if found is None else {id(tensor) for tensor in found}
        for name, parameter in self._of_others:
            if parameter.grad is not None if have is None else id(parameter) in have:
                raise TaskInvalid(
                    f"{name} has a gradient on a rank that does not train it: the task's loss, or the model's code "
                    "between its blocks, uses it in a section in which it did not on the first samples; use it at one "
                    f"place on every batch, or use {CURE}"
                )

    def own_buffers(self) -> list[Tensor]:
        """Return this rank's buffers."""
        return [buffer for name, buffer in self.whole.named_buffers() if self.is_own(name)]

    def broadcast_loose(self, group: Group) -> None:
        """Broadcast the tensors outside the blocks, which every rank has and one rank trains.

        Communication: one broadcast for each such tensor.

        Args:
            group: Ranks that have sections of the model; rank r has sections r, r + world size, and so on.
        """
        tensors = {**dict(self.whole.named_parameters()), **dict(self.whole.named_buffers())}
        for name, section in self.loose.items():
            if name in tensors and tensors[name].numel():
                group.broadcast([tensors[name].data], source_rank=section % group.world_size)

    def tensors(self) -> list[Tensor]:
        """Return this rank's parameters and buffers, and those outside the blocks, which every rank has."""
        named = [*self.whole.named_parameters(), *self.whole.named_buffers()]
        return [tensor for name, tensor in named if self.is_here(name)]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's tensors, and its blocks' extra state, under the model's names."""
        state = self.whole.state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if self.is_own(name)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's tensors."""
        return self.whole.load_state_dict(state_dict, strict=False, assign=assign)

    # with this rank's part of an optimiser

    def divide(self, optimizer: Optimizer) -> None:
        """Reduce an optimiser over the whole model to the parameters of this part."""
        self._group_names = group_names(self.whole, optimizer)
        # frozen ones too, because checkpoints name them
        keep_only(optimizer, [p for name, p in self.whole.named_parameters() if self.is_own(name)])

    def save(self, optimizer: Optimizer) -> StrategyState:
        """Return this rank's tensors and its part of the optimiser's state; all ranks' together are the checkpoint."""
        state = optimizer_to_names(self.whole, optimizer)
        return StrategyState(model=self.state_dict(), optimizer=state, is_spread=True)

    def load(self, source: StateSource, optimizer: Optimizer) -> None:
        """Load this rank's part of a checkpoint."""
        source.load_model(self, is_part=True)
        source.load_optimizer(self.whole, optimizer, whole=self._group_names)

    def needs(self) -> Needs:
        """Return a request for this rank's tensors, and its parameters' part of the optimiser's state."""
        own = ((name, p) for name, p in self.whole.named_parameters(remove_duplicate=False) if self.is_own(name))
        return Needs(model=rectangles(self.state_dict().items()), optimizer=rectangles(own))


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), leaf)
    return tensor


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or buffer by another tensor; a parameter stays the same object."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    before = getattr(module, leaf)
    if isinstance(before, nn.Parameter):
        give_data(before, value.detach())
    else:
        setattr(module, leaf, value)


def keep_only(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Remove all other parameters from an optimiser; its groups stay, so that all ranks have the same ones.

    State that it made when it was built is moved to the device of its parameter.
    """
    kept = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        flags = [id(parameter) in kept for parameter in group["params"]]
        if "param_names" in group:
            group["param_names"] = [n for n, is_kept in zip(group["param_names"], flags, strict=True) if is_kept]
        # in place: some optimisers hold the list itself
        group["params"][:] = [p for p, is_kept in zip(group["params"], flags, strict=True) if is_kept]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) not in kept]:
        del optimizer.state[parameter]
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != STEP_KEY:
                state[key] = value.to(parameter.device)
