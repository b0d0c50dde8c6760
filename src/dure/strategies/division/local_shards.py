"""Optimiser over this rank's shards as plain tensors, for strategies whose parameters are DTensors.

A DTensor combines a parameter's name, shape and position, which checkpoints need. But stepping DTensors is slow (100
small ones under AdamW: 83 ms instead of 5 on the CPU), and an optimiser cannot step DTensors and plain tensors
together. So the optimiser holds plain views of the same memory, and gets the DTensors back while a checkpoint is read
or written. That is correct for optimisers that step each element independently of the others; `check_optimizer` refuses
the rest.
"""

import importlib
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.errors import SpecInvalid, TaskInvalid
from dure.strategies.contract.batches import map_tensors
from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.contract.replica_state import ReplicaState, replica_state
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.watch.parameter_watch import freezing_fault
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.division.optimizer_trial import reason_not_to_cut
from dure.strategies.division.step_hooks import fault_of_hooks, refuse_later_hooks
from dure.strategies.state.optimizer import optimizer_to_names
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.terminal import few
from dure.torchcompat.gradients import clip_to_norm
from dure.torchcompat.optimizers import found_overflows
from dure.torchcompat.tensors import divided_like, own_attributes

_requires_grad = operator.attrgetter("requires_grad")


class LocalShards:
    """Plain local tensors in place of DTensors in an optimiser."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
        """Put local tensors into the optimiser, its groups and its state.

        Args:
            named: Parameters, DTensors or not, in the optimiser or not, with their names.
            optimizer: Optimiser over some of them.
        """
        self._optimizer = optimizer
        self._wholes: dict[int, nn.Parameter] = {}
        """DTensors by the ids of their local tensors."""
        self._locals: dict[int, nn.Parameter] = {}
        """Local tensors by the ids of their DTensors."""
        self.parameters: list[nn.Parameter] = []
        """Local tensors of the trained parameters, or those that are not DTensors themselves, in the given order."""
        self.named: list[tuple[str, Tensor]] = []
        """This rank's shards of all parameters, trained or frozen."""
        for name, parameter in named:
            if not parameter.requires_grad:
                self.named.append((name, _local(parameter).detach()))
                continue
            self.parameters.append(self._local_of(parameter) if isinstance(parameter, DTensor) else parameter)
            self.named.append((name, self.parameters[-1]))
        self._exchange(self._locals, lambda parameter, value: _to_local(value))

    def _local_of(self, parameter: DTensor) -> nn.Parameter:
        # detached: the same memory, and a leaf, as an optimiser requires
        local = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
        vars(local).update(own_attributes(parameter))
        self._wholes[id(local)], self._locals[id(parameter)] = parameter, local  # type: ignore[assignment]
        return local

    def refuse_frozen(self, strategy: str) -> None:
        """Refuse local tensors that the task has frozen by the optimiser's groups: the model has others.

        Args:
            strategy: Name of the strategy.

        Raises:
            TaskInvalid: Names the parameters.
        """
        if not all(map(_requires_grad, self._locals.values())):
            names = [name for name, local in self.named if id(local) in self._wholes and not local.requires_grad]
            raise TaskInvalid(freezing_fault(names, "froze", strategy))

    def axes_of(self, local: Tensor) -> tuple[str, ...]:
        """Return the axes of the mesh along which other ranks have other shards; none for a whole parameter."""
        whole: Any = self._wholes.get(id(local))
        if not isinstance(whole, DTensor):
            return ()
        names = whole.device_mesh.mesh_dim_names or ()
        return tuple(name for name, placed in zip(names, whole.placements, strict=True) if not placed.is_replicate())

    def take_gradients(self) -> None:
        """Assign the DTensors' gradients to their local tensors.

        Raises:
            TaskInvalid: A parameter that is no DTensor has a divided gradient.
        """
        for local in self.parameters:
            whole = self._wholes.get(id(local))
            if whole is None and isinstance(local.grad, DTensor):
                name = next(name for name, parameter in self.named if parameter is local)
                raise TaskInvalid(
                    f"the model uses {name} with divided values in code that cannot be followed (torch.jit.script, an "
                    "extension in C++): call functions of torch there, leave the layers before it whole, or use ddp"
                )
            if whole is None or whole.grad is None:
                continue
            gradient: Any = whole.grad
            local.grad = gradient.to_local()
            whole.grad = None

    def square_of_norm(
        self,
        parameters: Iterable[nn.Parameter],
        groups: Mapping[str, Group],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return the square of the norm of the whole gradients.

        Communication: for each group one blocking all_reduce of a number for each way of division.

        Args:
            parameters: Local tensors of some parameters.
            groups: Groups by the axes of the mesh along which parameters may be divided.
            dtype: Dtype of the result; float64 if the device has it, because a square may overflow float32.
            device: Device of the result.
        """
        gradients: dict[tuple[str, ...], list[Tensor]] = {}
        for parameter in parameters:
            of_these = gradients.setdefault(self.axes_of(parameter), [])
            if parameter.grad is not None:
                of_these.append(parameter.grad)
        if not gradients:
            return torch.zeros((), dtype=dtype, device=device)
        squares = torch.zeros(len(gradients), dtype=dtype, device=device)
        for position, some in enumerate(gradients.values()):
            if some:
                squares[position] = nn.utils.get_total_norm(some).to(squares).square()
        for axis, group in groups.items():
            # where a gradient is whole along the axis, every rank has its square
            is_divided = torch.tensor([axis in axes for axes in gradients], device=device)
            summed = squares * is_divided
            group.all_reduce_sum(summed)
            squares = torch.where(is_divided, summed, squares)
        return squares.sum()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Put the DTensors themselves into the optimiser, as the model's names and a checkpoint's shards need them."""
        self._exchange(self._wholes, _to_whole)
        try:
            yield
        finally:
            self._exchange(self._locals, lambda parameter, value: _to_local(value))

    def _exchange(self, others: dict[int, nn.Parameter], convert: Callable[[nn.Parameter, Any], Any]) -> None:
        if not others:
            return  # the groups' lists stay the same objects, which some optimisers hold
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]
        state: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in self._optimizer.state.items():
            other = others.get(id(key))
            state[key if other is None else other] = value if other is None else convert(other, value)
        self._optimizer.state = state


def _to_whole(parameter: Any, state: Any) -> Any:
    """Return a local tensor's optimiser state with elementwise values as DTensors like the parameter."""
    shape = parameter.to_local().shape

    def convert(value: Tensor) -> Tensor:
        if value.shape != shape:
            return value  # a step count, for example
        return divided_like(parameter, value)

    return map_tensors(state, convert)


def _to_local(state: Any) -> Any:
    return map_tensors(state, lambda value: value.to_local() if isinstance(value, DTensor) else value)


def faults_of_cutting(optimizer: Optimizer) -> list[str]:
    """Return a fault if an optimiser's step of an element depends on the rest of its tensor, which other ranks have."""
    if fault := fault_of_hooks(optimizer):
        return [fault]
    reason = reason_not_to_cut(optimizer)
    if reason is None:
        return []
    return [
        f"the optimiser {type(optimizer).__name__} cannot step a part of a parameter, because {reason}: use one that "
        "steps each element by itself, such as AdamW or SGD, or --strategy ddp"
    ]


def faults_of_shards(model: nn.Module, traits: LossTraits) -> list[str]:
    """Return faults of hooks and attributes of parameters, which their shards, other tensors, would lose silently."""
    faults = []
    parameters = dict(model.named_parameters())
    if names := [name for name in traits.hooked_parameters if name in parameters]:
        faults.append(f"there are hooks on parameters ({few(names)}), which their shards would not have: use ddp")
    state = (*traits.learned_state, *traits.counted_state)
    of_parameters = tuple(f"model.{name}." for name in parameters)
    if set_on := [path for path in state if path.startswith(of_parameters)]:
        faults.append(
            f"the task's loss sets {few(set_on)}, attributes of parameters, and the optimiser has other tensors in "
            "their place: keep such state in the task, or use ddp"
        )
    return faults


def faults_of_common_loss(traits: LossTraits, num_alike: int) -> list[str]:
    """Return the fault of a loss that depends on the rank, where ranks compute the same samples by divided layers.

    Each keeps parameters that are not divided, which would part.

    Args:
        traits: Traits of the loss.
        num_alike: Number of ranks that compute the same samples.
    """
    if num_alike == 1 or not traits.differs_by_rank:
        return []
    return [
        f"the loss depends on the rank ({traits.differs_by_rank}), and the ranks along the axis tensor compute one "
        "loss together: leave the number of the rank out of the task, or use ddp"
    ]


class ShardedStrategy(Strategy):
    """Base of strategies in which some or all parameters are DTensors.

    `place` creates them; `shard_groups` are the groups over whose ranks they are divided.
    """

    rules = WeightRules(follows_groups=False)

    shard_groups: dict[str, Group]
    """Groups by the axes of the mesh; a parameter may be divided along some of them."""

    @classmethod
    def import_late_parts(cls) -> None:
        """Import modules that a DTensor needs to compute a rank's shard: 0.08 s of processor time in every rank."""
        importlib.import_module("torch.distributed.checkpoint.planner_helpers")

    @classmethod
    def check_optimizer(cls, optimizer: Optimizer) -> list[str]:
        """Refuse an optimiser whose step of an element depends on the rest of its tensor, which other ranks have."""
        return faults_of_cutting(optimizer)

    def check_traits(self, model: nn.Module) -> list[str]:
        """Refuse also hooks on parameters: shards are other tensors, which would lose them without an error."""
        num_alike = self.group.world_size // self.share.count
        faults = faults_of_shards(model, self.traits) + faults_of_common_loss(self.traits, num_alike)
        return super().check_traits(model) + faults

    def distribute(self) -> None:
        """Give the optimiser local tensors, of which `trainable` consists from now on."""
        if faults := self.check_optimizer(self.optimizer):
            raise SpecInvalid([f"strategy is {self.info.name}: {fault}" for fault in faults])
        refuse_later_hooks(self.optimizer)
        super().distribute()
        self.shards = LocalShards(self.model.named_parameters(), self.optimizer)
        self.trainable = self.shards.parameters

    def check_groups(self) -> None:
        """Refuse parameters of the optimiser's groups that the schedule has frozen: the model has others."""
        super().check_groups()
        self.shards.refuse_frozen(self.info.name)

    def unscale_gradients(self) -> None:
        """Unscale, and make every rank skip the step if any rank's gradient overflowed.

        Communication: with fp16, one blocking all_reduce of one number per device of the gradients, over all ranks.
        """
        super().unscale_gradients()
        if self.precision.scaler is not None:
            for found in found_overflows(self.precision.scaler, self.optimizer):
                self.group.all_reduce_sum(found)

    def clip_gradients(self, parameters: list[nn.Parameter], most: float) -> None:
        """Clip by the norm of the whole gradient: squares of sharded gradients are summed over the ranks with shards.

        Communication: for each of `shard_groups` one blocking all_reduce of a number for each way of division.
        """
        square = self.shards.square_of_norm(parameters, self.shard_groups, dtype=self.sums.dtype, device=self.device)
        clip_to_norm(parameters, most, square)

    def replica(self) -> ReplicaState:
        """Return this rank's shards; ranks at the same position in their `shard_groups` hold the same."""
        position = " of ".join(str(group.rank) for group in self.shard_groups.values())
        return replica_state(f"shard {position}", self.shards.named, self.optimizer)

    def state_dict(self) -> StrategyState:
        """Return this rank's shards under the model's own names."""
        with self.shards.whole():
            optimizer = optimizer_to_names(self.model, self.optimizer)
        return StrategyState(model=self.model.state_dict(), optimizer=optimizer)

    def load_state_dict(self, source: StateSource) -> None:
        """Load the parts of a checkpoint that this rank's shards need."""
        source.load_model(self.model)
        with self.shards.whole():
            source.load_optimizer(self.model, self.optimizer)


def share_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards of parameters."""
    return sum(_local(p).numel() * p.element_size() for p in parameters)


def whole_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of whole parameters, with the shards of all ranks."""
    return sum(math.prod(p.shape) * p.element_size() for p in parameters)


def _local(parameter: Any) -> Tensor:
    local: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local
