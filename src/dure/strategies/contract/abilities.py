"""Abilities that only some strategies have, each a small interface, and questions to any strategy by way of them.

Those of classes are looked for on the class itself, before there is an object of it.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.spec import RunSpec
from dure.strategies.contract.step_facts import LostShare
from dure.strategies.contract.strategy import Strategy
from dure.strategies.state.saved_state import StrategyState


@runtime_checkable
class HasRoles(Protocol):
    """Class of a strategy whose ranks have different parts in it."""

    @classmethod
    def role_for(cls, group: Group, spec: RunSpec) -> type[Strategy]:
        """Return the class of this rank's part."""


@runtime_checkable
class ImportsLate(Protocol):
    """Class of a strategy that has parts which every rank would import later."""

    @classmethod
    def import_late_parts(cls) -> None:
        """Import them; called once, in the process that forks the ranks."""


@runtime_checkable
class ChecksModel(Protocol):
    """Class of a strategy that cannot take every model."""

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Return why it cannot take a model, a sentence each: the module's name and what to use instead.

        Asked before any process starts, of strategies whose row says `checks_model`, and again on each rank.

        Args:
            model: As the task builds it, on the meta device where that works: shapes are there, values are not.
            spec: The run, which says over how many devices the model is to be spread.
        """


@runtime_checkable
class ChecksOptimizer(Protocol):
    """Class of a strategy that cannot take every optimiser."""

    @classmethod
    def check_optimizer(cls, optimizer: Optimizer) -> list[str]:
        """Return why it cannot take the task's optimiser, a sentence each; asked where `check_model` is.

        Args:
            optimizer: As the task builds it, over a model that may be on the meta device. It is left as it is.
        """


@runtime_checkable
class OutlivesRanks(Protocol):
    """Strategy that goes on without ranks that die, and divides batches over the others."""

    def share_at(self, step: int) -> tuple[int, int]:
        """Return which share of a step's batch is this rank's, and of how many.

        Asked once for every step, in order: ahead of the step as far as loader processes fetch ahead.
        """

    def lost_shares(self) -> list[LostShare]:
        """Return the shares that were lost with their rank, each once; known whenever weights have been read."""


@runtime_checkable
class GathersState(Protocol):
    """Strategy whose ranks exchange something for `state_dict`."""

    def own_state(self) -> StrategyState:
        """Return this rank's part of `state_dict`, without exchanging anything: for a snapshot in memory.

        What other ranks know better is left out. The same groups of all ranks are brought together when it is read.
        """


def role_of(strategy: type[Strategy], group: Group, spec: RunSpec) -> type[Strategy]:
    """Return the class of this rank's part in a strategy."""
    entry: object = strategy
    return entry.role_for(group, spec) if isinstance(entry, HasRoles) else strategy


def import_late_parts(strategy: object) -> None:
    """Import what every rank would import later."""
    if isinstance(strategy, ImportsLate):
        strategy.import_late_parts()


def faults_of_model(strategy: object, model: nn.Module, spec: RunSpec) -> list[str]:
    """Return why a strategy cannot take a model, a sentence each."""
    return strategy.check_model(model, spec) if isinstance(strategy, ChecksModel) else []


def faults_of_optimizer(strategy: object, optimizer: Optimizer) -> list[str]:
    """Return why a strategy cannot take the task's optimiser, a sentence each."""
    return strategy.check_optimizer(optimizer) if isinstance(strategy, ChecksOptimizer) else []


def share_by_step(strategy: Strategy) -> Callable[[int], tuple[int, int]]:
    """Return a function that returns which share of a step's batch is this rank's, and of how many."""
    if isinstance(strategy, OutlivesRanks):
        return strategy.share_at
    return lambda step: (strategy.share.index, strategy.share.count)


def lost_shares(strategy: Strategy) -> list[LostShare]:
    """Return the shares that were lost with their rank, each once."""
    return strategy.lost_shares() if isinstance(strategy, OutlivesRanks) else []


def own_state(strategy: Strategy) -> StrategyState:
    """Return this rank's part of a strategy's state, without exchanging anything."""
    return strategy.own_state() if isinstance(strategy, GathersState) else strategy.state_dict()


def steady_names(strategy: Strategy) -> frozenset[str]:
    """Return the names of the parameters that only `optimizer_step` changes, as its state does; none if unsure.

    Frozen parameters are not among them: that of a teacher, say, may follow its pupil whenever the task likes.
    """
    if not strategy.rules.changes_in_step_only:
        return frozenset()
    named = strategy.model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if parameter.requires_grad)
