"""One process, one device: the definition that every other strategy is held to."""

from dure.strategies.contract.local_sums import LocalSums
from dure.strategies.contract.parameter_watch import Freezing


class Single(LocalSums):
    """The plain loop: forward, backward, step."""

    changes_in_step_only = True

    def follow_freezing(self, freezing: Freezing) -> None:
        """Train what is unfrozen from here on."""
        self.train_all()

    def sent_bytes(self, num_microsteps: int) -> int:
        """Do nothing: there is no other rank."""
        return 0
