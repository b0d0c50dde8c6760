"""Base of the strategies under which processes keep sections of the model: `pipeline` and `rpc_model`."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.errors import SpecInvalid, TaskInvalid
from dure.strategies.contract.abilities import faults_of_optimizer
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.division.optimizer_trial import faults_of_parts
from dure.strategies.division.step_hooks import refuse_later_hooks
from dure.strategies.sections.absent_tensors import AbsentUsed, UsedTensors, guarded
from dure.strategies.sections.gradients import clip_by_common_norm, share_overflows, square_of_norm
from dure.strategies.sections.own_part import LocalStages
from dure.strategies.sections.plan import CURE, SectionPlan
from dure.strategies.sections.random_state import CommonSeeds, SectionDraws, SectionDrawWatch
from dure.strategies.sections.sectioned_model import SectionedModel
from dure.strategies.state.checksum import checksum
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.strategies.state.tensor_shard import Needs
from dure.strategies.state.trial import KeptBuffers
from dure.terminal import few


class SectionedStrategy(Strategy):
    """Strategy with sections of the model on several ranks, each of which steps and saves its own."""

    rules = WeightRules(
        follows_groups=False,
        freezing="refused",
        undoes_writes=True,
        divides_model=True,
        divides_gradients=True,
        steps_elsewhere=True,
        divides_state=True,
        divides_groups=True,
    )

    section_ranks: Group
    """Ranks that have the sections of one model."""
    evaluated: nn.Module
    """Sections as one model, for evaluations."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._seeds = CommonSeeds()
        self._draws = SectionDraws(self.device)
        self.drawing = SectionDrawWatch(self.devices, self._draws, self._seeds)

    @classmethod
    def check_optimizer(cls, optimizer: Optimizer) -> list[str]:
        """Refuse an optimiser that needs all parameters together, or has hooks: every rank steps its own sections."""
        return faults_of_parts(optimizer, "cannot step each section by itself")

    @abstractmethod
    def decide(self, model: nn.Module) -> dict[str, Any]:
        """Return the `plan`, or the `faults` that prevent one; called on rank 0."""

    def place(self, model: nn.Module) -> nn.Module:
        """Decide where to cut; the model stays whole and is not moved until the optimiser is built.

        Communication: one gathered JSON message, the plan.
        """
        decision = self.group.all_gather_json(self.decide(model) if self.group.rank == 0 else None)[0]
        if decision["faults"]:
            raise SpecInvalid([f"strategy is {self.info.name}: {fault}" for fault in decision["faults"]])
        self.plan = SectionPlan(**decision["plan"])
        changed = {*self.traits.learned_buffers, *self.traits.counted_buffers, *self.traits.model_buffers}
        if shared := self.plan.buffers_of_several(model, changed):
            raise SpecInvalid(
                [
                    f"strategy is {self.info.name}: {few(shared)} are one buffer, which forward changes, and each "
                    f"section has a copy of it: keep the blocks together with {self.info.flag}.cuts, or use ddp"
                ]
            )
        return model

    def keep(self, sections: Iterable[int]) -> None:
        """Keep this rank's sections, of the model and of the optimiser, and release the others."""
        if faults := faults_of_optimizer(type(self), self.optimizer):
            raise SpecInvalid([f"strategy is {self.info.name}: {fault}" for fault in faults])
        refuse_later_hooks(self.optimizer)
        self.part = LocalStages(self.model, self.plan, sections, self.device)
        self.trainable = self.part.trainable()
        self.part.divide(self.optimizer)
        self.sections = self.sectioned_model()

    def sectioned_model(self) -> SectionedModel:
        """Return the model of which a section is computed at a time."""
        return SectionedModel(self.model, self.plan)

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task, which may not use tensors of other ranks.

        Raises:
            TaskInvalid: It uses such tensors, or their gradients in an evaluation.
        """
        with guarded():
            return function(*args) if torch.is_grad_enabled() else self._evaluated(function, *args)

    def _evaluated(self, function: Callable[..., Any], *args: Any) -> Any:
        used, failure = UsedTensors({}), None
        try:
            with used:
                value = function(*args)
        except TaskInvalid as error:
            if not isinstance(error.__cause__, AbsentUsed):
                raise
            raise TaskInvalid(
                f"in an evaluation the task's {function.__name__} would need the weights of {error.__cause__} on a "
                f"rank that has those of other sections: let the model return what is needed of them, or use {CURE}"
            ) from error
        except Exception as error:
            failure = error
        # those that are read before any backward pass are None, as in one process
        if used.has_used_gradients and used.has_gone_back and len(self.plan.begins) > 1:
            raise TaskInvalid(
                f"in an evaluation the task's {function.__name__} would need gradients, of which a rank has those of "
                f"its own section at most: use {CURE}"
            ) from failure
        if failure is not None:
            raise failure
        return value

    def unscale_gradients(self) -> None:
        """Unscale, and agree over all ranks on whether a gradient overflowed: all ranks skip the step, or none.

        Communication: with fp16 one all_reduce of one number.
        """
        super().unscale_gradients()
        share_overflows(self.group, self.precision, self.optimizer, self.device)

    def clip_gradients(self, parameters: list[nn.Parameter], most: float) -> None:
        """Clip by the norm over all sections. Communication: one all_reduce of one number."""
        clip_by_common_norm(self.section_ranks, parameters, most, square=self.square_of_norm(parameters))

    def square_of_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the square of the norm of this rank's gradients."""
        return square_of_norm(parameters, dtype=self.sums.dtype, device=self.device)

    def evaluation_models(self) -> list[nn.Module]:
        """Return the sections as one model: a call runs through all of them."""
        return [self.evaluated]

    def missed_state(self, changed: Iterable[str]) -> list[str]:
        """Return the state that an evaluation left with other values on some ranks than on those that use it.

        Communication: one gathered JSON message of the paths and checksums.
        """
        now = self._as_read.now()
        buffers = {f"model.{name}": checksum([now[name]]) for name in self._as_read.changed() if name in now}
        by_rank = self.group.all_gather_json([{**dict.fromkeys(changed, 0), **buffers}, self.share.takes_samples])
        values = [theirs for theirs, _ in by_rank]
        have_task = {rank for rank, (_, takes_samples) in enumerate(by_rank) if takes_samples}
        # what the loss changes too was tried with the sections
        known = {*self.traits.learned_state, *self.traits.counted_state}
        found = dict.fromkeys(path for theirs in values for path in theirs if path not in known)
        changing = {path: {rank for rank, theirs in enumerate(values) if path in theirs} for path in found}
        return [
            path
            for path, ranks in changing.items()
            if len({values[rank].get(path) for rank in ranks | self._users(path, have_task)}) > 1
        ]

    def _users(self, path: str, have_task: set[int]) -> set[int]:
        """Return the ranks that may use state, of which the ranks in `have_task` use that of the task."""
        if not path.startswith("model."):
            return have_task
        name = path.removeprefix("model.")
        for call in self.plan.calls:
            if name.startswith(f"{call}."):
                return {self.rank_of(self.plan.section_of_block(call))}
        # the section that keeps a buffer is the first one that uses it
        return {self.rank_of(section) for section in range(self.part.loose.get(name, 0), len(self.plan.begins))}

    def rank_of(self, section: int) -> int:
        """Return the first rank with a section."""
        return section % self.section_ranks.world_size

    def before_reading(self) -> None:
        """Broadcast the tensors outside the blocks, which every rank has and one rank trains."""
        self.part.broadcast_loose(self.section_ranks)
        self._as_read = KeptBuffers(self.model, self.part.loose.__contains__)

    def state_dict(self) -> StrategyState:
        """Return this rank's tensors and optimiser state."""
        return self.part.save(self.optimizer)

    def load_state_dict(self, source: StateSource) -> None:
        """Load this rank's part of a checkpoint."""
        self.part.load(source, self.optimizer)

    def needs(self) -> Needs:
        """Return a request for this rank's part of a checkpoint."""
        return self.part.needs()
