"""One process, one device: the reference for every other strategy."""

from dure.strategies.contract.step_facts import StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules


class Single(Strategy):
    """The plain loop: forward, backward, step."""

    rules = WeightRules(changes_in_step_only=True, freezing="followed")

    def sync_gradients(self) -> StepFacts:
        """Sum the terms; there is no other rank."""
        return self.sums.step_facts()

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return 0: there is no other rank."""
        return 0
