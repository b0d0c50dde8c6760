"""Data parallelism in its textbook form: backward, then one all-reduce per gradient, then the step.

The simple counterpart of `ring_ddp` and `ddp`: without buckets and without overlap. It exists to be read, and as a
reference for the fast ones.
"""

from dure.comm.choice import open_chosen
from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.replica_state import whole_replica
from dure.strategies.contract.step_facts import StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.data_parallel.gradient_sums import add_up_gradients


class NaiveDDP(Strategy):
    """One process per device; every gradient is reduced separately after backward."""

    rules = WeightRules(changes_in_step_only=True, freezing="followed")

    def distribute(self) -> None:
        """Send rank 0's weights to all ranks."""
        super().distribute()
        self.group.broadcast([*self.model.parameters(), *self.model.buffers()])
        self._all_reduce = open_chosen(self.spec.comm, self.device.type, self.group)

    def describe(self) -> list[str]:
        """Return the name of the algorithm that sums the gradients."""
        return [f"gradients one by one through {self._all_reduce.name} (--comm {self.spec.comm})"]

    def sync_gradients(self) -> StepFacts:
        """Sum each gradient that any rank has; a gradient that no rank has stays None, as on one device."""
        add_up_gradients(self.trainable, self.group, self._all_reduce.all_reduce)
        return reduced_facts(self)

    replica = whole_replica

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes that the algorithm sends for all gradients, each reduced separately."""
        return sum(self._all_reduce.sent_bytes_for(p.numel(), p.element_size()) for p in self.trainable)

    def close(self) -> None:
        """Close the algorithm."""
        self._all_reduce.close()
