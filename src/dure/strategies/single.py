"""One process, one device: the definition that every other strategy is held to."""

from collections.abc import Iterable

from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.local_sums import LocalSums
from dure.strategies.contract.parameter_watch import Freezing
from dure.strategies.contract.step_facts import Requests
from dure.torchcompat import run_backward


class Single(LocalSums):
    """The plain loop: forward, backward, step."""

    changes_in_step_only = True

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate the gradients of all microbatches."""
        self.begin_step(requests)
        for microbatch in microbatches:
            term = self.loss_term(self.model, microbatch, global_samples)
            run_backward(self.precision.scale(term.root))
            self.add_term(term)

    def follow_freezing(self, freezing: Freezing) -> None:
        """Train what is unfrozen from here on."""
        self.train_all()

    def sent_bytes(self, num_microsteps: int) -> int:
        """Nobody to send to."""
        return 0
