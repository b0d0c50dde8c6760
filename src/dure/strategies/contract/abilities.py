"""Optional abilities of strategies, each a small protocol, and functions that query any strategy for them.

Abilities of classes are looked up on the class itself, before an object of it exists.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.spec import RunSpec
from dure.strategies.contract.step_facts import LostShare, Requests
from dure.strategies.contract.strategy import Strategy
from dure.strategies.state.saved_state import StrategyState


@runtime_checkable
class HasRoles(Protocol):
    """Class of a strategy whose ranks have different roles."""

    @classmethod
    def role_for(cls, group: Group, spec: RunSpec) -> type[Strategy]:
        """Return the class for this rank's role."""


@runtime_checkable
class ImportsLate(Protocol):
    """Class of a strategy with modules that every rank would import later."""

    @classmethod
    def import_late_parts(cls) -> None:
        """Import these modules; called once, in the process that forks the ranks."""


@runtime_checkable
class ChecksModel(Protocol):
    """Class of a strategy that cannot train every model."""

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Return the reasons why it cannot train a model, one sentence each: the module's name and what to use instead.

        Called for strategies whose row has `checks_model`, before any process starts and again on each rank.

        Args:
            model: Model as the task builds it; on the meta device if that works, with shapes but without values.
            spec: Settings of the run, among them the number of devices over which the model is divided.
        """


@runtime_checkable
class ChecksOptimizer(Protocol):
    """Class of a strategy that cannot use every optimiser."""

    @classmethod
    def check_optimizer(cls, optimizer: Optimizer) -> list[str]:
        """Return the reasons why it cannot use the task's optimiser, one sentence each; called where `check_model` is.

        Args:
            optimizer: Optimiser as the task builds it, over a model that may be on the meta device. It is not changed.
        """


@runtime_checkable
class OutlivesRanks(Protocol):
    """Strategy that continues without ranks that die, and divides batches over the others."""

    def share_at(self, step: int) -> tuple[int, int]:
        """Return the index of this rank's share of a step's batch, and the number of shares.

        Called once per step, in order, and as many steps ahead as the loader processes prefetch.
        """

    def lost_shares(self) -> list[LostShare]:
        """Return the shares that were lost with their rank, each once; known whenever weights have been read."""


@runtime_checkable
class ServesSteps(Protocol):
    """Strategy in which some ranks serve the others and compute no samples."""

    def serve_step(self, requests: Requests) -> None:
        """Begin a step; called instead of `forward_backward` if this rank's share takes no samples.

        Args:
            requests: Requests of this rank; all ranks receive them with the step's facts.
        """


@runtime_checkable
class GathersState(Protocol):
    """Strategy whose ranks communicate in `state_dict`."""

    def own_state(self) -> StrategyState:
        """Return this rank's part of `state_dict` without communication, for a snapshot in memory.

        State of which other ranks have the newer values is left out. The same groups of all ranks are combined when the
        snapshot is read.
        """


def role_of(strategy: type[Strategy], group: Group, spec: RunSpec) -> type[Strategy]:
    """Return the class for this rank's role in a strategy."""
    entry: object = strategy
    return entry.role_for(group, spec) if isinstance(entry, HasRoles) else strategy


def import_late_parts(strategy: object) -> None:
    """Import the modules of a strategy that every rank would import later."""
    if isinstance(strategy, ImportsLate):
        strategy.import_late_parts()


def faults_of_model(strategy: object, model: nn.Module, spec: RunSpec) -> list[str]:
    """Return the reasons why a strategy cannot train a model, one sentence each."""
    return strategy.check_model(model, spec) if isinstance(strategy, ChecksModel) else []


def faults_of_optimizer(strategy: object, optimizer: Optimizer) -> list[str]:
    """Return the reasons why a strategy cannot use the task's optimiser, one sentence each."""
    return strategy.check_optimizer(optimizer) if isinstance(strategy, ChecksOptimizer) else []


def share_by_step(strategy: Strategy) -> Callable[[int], tuple[int, int]]:
    """Return a function from a step to the index of this rank's share of its batch and the number of shares."""
    if isinstance(strategy, OutlivesRanks):
        return strategy.share_at
    return lambda step: (strategy.share.index, strategy.share.count)


def lost_shares(strategy: Strategy) -> list[LostShare]:
    """Return the shares that were lost with their rank, each once."""
    return strategy.lost_shares() if isinstance(strategy, OutlivesRanks) else []


def own_state(strategy: Strategy) -> StrategyState:
    """Return this rank's part of a strategy's state, without communication."""
    return strategy.own_state() if isinstance(strategy, GathersState) else strategy.state_dict()


def steady_names(strategy: Strategy) -> frozenset[str]:
    """Return the names of the parameters that only `optimizer_step` changes, together with its state; none if unsure.

    Frozen parameters are excluded: those of a teacher model, for example, may follow its student at any time.
    """
    if not strategy.rules.changes_in_step_only:
        return frozenset()
    named = strategy.model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if parameter.requires_grad)
