"""Data parallelism as it is explained on a blackboard: backward, then one all-reduce per gradient, then the step.

The plain twin of `ring_ddp` and `ddp`: nothing is bucketed, nothing overlaps. It is there to be read, and to be what
the fast ones are held to.
"""

from dure.comm.choice import open_chosen
from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.replica_state import whole_replica
from dure.strategies.contract.step_facts import StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.data_parallel.gradient_sums import add_up_gradients


class NaiveDDP(Strategy):
    """A process per device; every gradient is reduced by itself after backward."""

    rules = WeightRules(changes_in_step_only=True, freezing="followed")

    def distribute(self) -> None:
        """Begin with rank 0's weights everywhere."""
        super().distribute()
        self.group.broadcast([*self.model.parameters(), *self.model.buffers()])
        self._all_reduce = open_chosen(self.spec.comm, self.device.type, self.group)

    def describe(self) -> list[str]:
        """Say which algorithm adds the gradients up."""
        return [f"gradients one by one through {self._all_reduce.name} (--comm {self.spec.comm})"]

    def sync_gradients(self) -> StepFacts:
        """Add up each gradient that any rank has; one that no rank has stays None, as on one device."""
        add_up_gradients(self.trainable, self.group, self._all_reduce.all_reduce)
        return reduced_facts(self)

    replica = whole_replica

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return what the algorithm sends for every gradient by itself."""
        return sum(self._all_reduce.sent_bytes_for(p.numel(), p.element_size()) for p in self.trainable)

    def close(self) -> None:
        """Let go of the algorithm."""
        self._all_reduce.close()
