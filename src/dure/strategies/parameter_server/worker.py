"""Worker's side of a parameter server, synchronous or asynchronous."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.parameter_server.exchange import Exchange
from dure.strategies.parameter_server.options import ParameterServerOptions
from dure.strategies.parameter_server.serving import Serving
from dure.strategies.state.optimizer import optimizer_to_names
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.strategies.state.tensor_shard import Needs
from dure.units import format_bytes


class Worker(Strategy):
    """Rank with a device that computes on its share, pushes gradients and pulls parameters."""

    rules = WeightRules(
        follows_groups=False,
        undoes_writes=True,
        divides_gradients=True,
        steps_elsewhere=True,
        divides_state=True,
        sparse_gradients="none",
    )

    options: ParameterServerOptions

    num_push_numbers: int
    """Length of a push's header, before the gradients."""
    num_pull_numbers: int

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.serving = Serving(context.group, context.spec)
        self.take_share(DataShare(index=self.group.rank, count=self.serving.num_workers))
        self.facts_lag = 0

    def distribute(self) -> None:
        """Lay out a push and a pull for each server; the optimiser keeps no state here."""
        self.serving.divide(self.model, self.optimizer)
        self.optimizer.state.clear()  # some have state from the start (Adagrad), and so have the servers
        self.exchange = Exchange(
            self.serving.transport,
            self.serving.server_ranks,
            self.serving.shards,
            dict(self.model.named_parameters()),
            num_push_numbers=self.num_push_numbers,
            num_pull_numbers=self.num_pull_numbers,
            device=self.device,
        )
        self.pushes, self.pulls = self.exchange.pushes, self.exchange.pulls

    def describe(self) -> list[str]:
        """Return lines about the division of parameters over servers."""
        serving = self.serving
        sizes = ", ".join(format_bytes(sum(shard.num_bytes for shard in shards)) for shards in serving.shards)
        cut = "cut by rows" if serving.are_tensors_cut else "by whole tensors: the optimiser needs them whole"
        return [f"{serving.num_workers} worker(s), {len(serving.shards)} server(s) with {sizes} of parameters, {cut}"]

    def known_facts(self) -> list[float]:
        """Return this worker's `[loss sum, count, stop, save]` as numbers."""
        facts = self.sums.facts()
        return facts.tolist() if isinstance(facts, Tensor) else list(facts)

    def write_gradients(self) -> None:
        """Write the gradients into the pushes, and for each shard whether it has one."""
        self.exchange.write(lambda parameter: parameter.grad)

    def push(self) -> None:
        """Send the pushes; see `Exchange.push`."""
        self.exchange.push()

    def pull(self) -> None:
        """Receive the parameters; see `Exchange.pull`."""
        self.exchange.pull(lambda parameter, _: parameter)

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of the pushes."""
        return sum(push.num_bytes for push in self.pushes)

    def state_dict(self) -> StrategyState:
        """Return the weights, which the servers had sent, and the groups; the servers have the optimiser's state."""
        optimizer = optimizer_to_names(self.model, self.optimizer)
        optimizer["groups"] = self.serving.first_servers_groups(self.group, optimizer["groups"])
        return self._with_weights(optimizer)

    def own_state(self) -> StrategyState:
        """Return the same without the values of the groups, which only the servers know."""
        optimizer = optimizer_to_names(self.model, self.optimizer)
        optimizer["groups"] = [{"params": group["params"]} for group in optimizer["groups"]]
        return self._with_weights(optimizer)

    def _with_weights(self, optimizer: dict[str, Any]) -> StrategyState:
        model = self.model.state_dict() if self.group.rank == 0 else {}
        return StrategyState(model=model, optimizer=optimizer, is_spread=True)

    def load_state_dict(self, source: StateSource) -> None:
        """Load the weights, and send the servers theirs."""
        source.load_model(self.model)
        source.load_optimizer(self.model, self.optimizer, has_state=False)
        if self.serving.everyone.rank > 0:
            return
        self.exchange.write(lambda parameter: parameter.detach())
        self.push()

    def needs(self) -> Needs:
        """Return a request for the weights only: the servers have the optimiser's state."""
        return replace(super().needs(), optimizer={})

    def before_reading(self) -> None:
        """Send rank 0's buffers to all: each worker has its own BatchNorm statistics."""
        self.serving.follow_shapes(self.model)
        self.serving.broadcast_buffers(self.model, self.serving.everyone)

    def not_preserved(self) -> list[str]:
        """Return the differences from the one-device run that apply to the number of workers and their synchrony."""
        return self.serving.declared(super().not_preserved())

    def close(self) -> None:
        """Close the transport."""
        self.serving.close(self.group)
