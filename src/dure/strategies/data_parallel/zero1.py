"""ZeRO stage 1: gradients as under ddp, the optimiser's state divided over the ranks.

Rajbhandari et al. 2020, section 5.1 (P_os). Every rank has all gradients, steps a part of the parameters, and sends
these to the others; no rank keeps momentum of parameters that another rank steps. The engine is torch's
ZeroRedundancyOptimizer, which assigns whole parameters, the largest first, to the rank with the least. dure adds three
things: the task's own optimiser steps this rank's part, whatever its class and constructor; frozen parameters are
neither assigned nor sent; and each rank writes its part into checkpoints.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dure.errors import TaskInvalid
from dure.strategies.contract.replica_state import WHOLE, ReplicaState, replica_state
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.data_parallel.ddp import DDP
from dure.strategies.division.optimizer_trial import reason_not_to_divide
from dure.strategies.division.step_hooks import fault_of_replaced_step, run_around_all
from dure.strategies.state.optimizer import group_names, optimizer_to_names
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.strategies.state.tensor_shard import Needs, rectangles, version_of
from dure.torchcompat.imports import import_distributed_optim
from dure.torchcompat.optimizers import divide_optimizer


class ZeRO1(DDP):
    """DDP with a divided optimiser: `optimizer` has all parameter groups, `stepped` has this rank's part."""

    rules = WeightRules(
        changes_in_step_only=True,
        follows_groups=False,
        freezing="refused",
        orders_parameters=True,
        holds_memory=True,
        divides_state=True,
        divides_groups=True,
        sparse_gradients="of layers",
    )

    @classmethod
    def import_late_parts(cls) -> None:
        """Import the optimisers of torch.distributed: 0.8 s of processor time in every rank."""
        import_distributed_optim()

    @classmethod
    def check_optimizer(cls, optimizer: Optimizer) -> list[str]:
        """Refuse an optimiser that needs all parameters together, or that has nothing to divide."""
        name = type(optimizer).__name__
        if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
            return [f"the optimiser {name} holds no trainable parameter, so there is nothing to divide: use ddp"]
        if fault := fault_of_replaced_step(optimizer):
            return [fault]
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if len(dtypes := sorted({str(parameter.dtype) for parameter in trained})) > 1:
            return [
                f"the trained parameters have several dtypes ({', '.join(dtypes)}), which torch's "
                "ZeroRedundancyOptimizer does not take: give them one, or use --strategy ddp"
            ]
        reason = reason_not_to_divide(optimizer)
        if reason is None:
            return []
        return [
            f"the optimiser {name} cannot be divided over ranks, because {reason}: use one that steps each parameter "
            "by itself, such as AdamW or SGD, or --strategy ddp"
        ]

    def distribute(self) -> None:
        """Wrap the model in DDP, and reduce the optimiser to this rank's part."""
        if faults := self.check_optimizer(self.optimizer):
            raise TaskInvalid("; ".join(faults))
        super().distribute()
        self._group_names = group_names(self.model, self.stepped)
        groups = [dict(group) for group in self.stepped.param_groups]
        self.optimizer = divide(self.stepped)
        self.optimizer.defaults |= self.stepped.defaults  # torch's schedulers look there for the settings that exist
        # torch's would assign all parameters again, in a rehearsal of the schedule too
        self.optimizer.add_param_group = self.refuse_group  # type: ignore[method-assign]
        run_around_all(self.optimizer, self.stepped, groups)
        own: list[nn.Parameter] = [parameter for group in self.stepped.param_groups for parameter in group["params"]]
        self._own_bytes = sum(parameter.numel() * parameter.element_size() for parameter in own)

    def optimizer_step(self) -> None:
        """Step this rank's part, and let the other parameters have another version too, as after a step of all."""
        versions = [(parameter, version_of(parameter)) for parameter in self.trainable if parameter.grad is not None]
        super().optimizer_step()
        torch.autograd.graph.increment_version([p for p, version in versions if version_of(p) == version])

    def state_dict(self) -> StrategyState:
        """Return the weights, this rank's part of the optimiser's state, and the groups with all their names."""
        groups = [
            {**group, "params": names}
            for group, names in zip(self.optimizer.param_groups, self._group_names, strict=True)
        ]
        optimizer = {**optimizer_to_names(self.model, self.stepped), "groups": groups}
        return StrategyState(model=self.model.state_dict(), optimizer=optimizer, is_spread=True)

    def load_state_dict(self, source: StateSource) -> None:
        """Load the weights, and the part of the optimiser's state that this rank needs."""
        source.load_model(self.model)
        source.load_optimizer(self.model, self.stepped, whole=self._group_names)
        self.optimizer.state = self.stepped.state
        for group, loaded in zip(self.optimizer.param_groups, self.stepped.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})

    def needs(self) -> Needs:
        """Return a request for all weights, and for the optimiser state of the parameters that this rank steps."""
        own = {id(parameter) for group in self.stepped.param_groups for parameter in group["params"]}
        named = self.model.named_parameters(remove_duplicate=False)
        return replace(super().needs(), optimizer=rectangles((name, p) for name, p in named if id(p) in own))

    def replica(self) -> ReplicaState:
        """Return the weights, which every rank has; optimiser state is on one rank only."""
        return replica_state(WHOLE, self.model.named_parameters(), model=self.model)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of the gradients' all-reduce, and of this rank's parameters to every other rank."""
        return super().sent_bytes(num_microsteps) + (self.group.world_size - 1) * self._own_bytes


def divide(optimizer: Optimizer) -> Optimizer:
    """Reduce an optimiser to this rank's part of the parameters, and return an optimiser of all ranks over it.

    The object itself is kept, because the constructor's arguments for another one are unknown.
    """
    groups = [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [parameter for parameter in group["params"] if parameter.requires_grad],
        }
        for group in optimizer.param_groups
    ]

    def take_part(part: list[dict[str, Any]]) -> Optimizer:
        kept = {id(parameter) for group in part for parameter in group["params"]}
        optimizer.param_groups = part
        # some optimisers have state from the start (Adagrad)
        for parameter in [parameter for parameter in optimizer.state if id(parameter) not in kept]:
            del optimizer.state[parameter]
        return optimizer

    parameters = [parameter for group in groups for parameter in group["params"]]
    return divide_optimizer(groups, take_part, in_one_message=_fit_one_buffer(parameters))


def _fit_one_buffer(parameters: list[nn.Parameter]) -> bool:
    """Return whether parameters fit into one buffer per rank, to be sent at once, and keep their strides there."""
    return len({parameter.dtype for parameter in parameters}) == 1 and all(p.is_contiguous() for p in parameters)
