"""Server's side of a parameter server, synchronous or asynchronous: a rank without a device."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.batches import map_tensors
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.step_facts import Requests
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.parameter_server.options import ParameterServerOptions
from dure.strategies.parameter_server.serving import Serving
from dure.strategies.parameter_server.shards import Message, Shard
from dure.strategies.state.optimizer import group_names, optimizer_to_names
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.strategies.state.tensor_shard import Needs, Rectangle, TensorShard
from dure.torchcompat.tensors import own_attributes


class Server(Strategy):
    """Rank without a device that keeps some rows of the parameters and steps them."""

    options: ParameterServerOptions

    rules = WeightRules(follows_groups=False, divides_state=True, steps_elsewhere=True, sparse_gradients="none")

    num_push_numbers: int
    num_pull_numbers: int

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.serving = Serving(context.group, context.spec)
        self.take_share(DataShare(index=0, count=self.serving.num_workers, takes_samples=False, leads=False))
        self.facts_lag = 0
        self.requests = Requests()
        self.number = self.group.rank - self.serving.num_workers
        """Index of this server among the servers."""

    def distribute(self) -> None:
        """Keep this server's rows, in the buffer of the message that sends them, and release the rest of the model."""
        self.serving.divide(self.model, self.optimizer)
        self.own_shards = self.serving.shards[self.number]
        self.pushes = [
            Message(self.num_push_numbers + len(self.own_shards), self.own_shards) for _ in self.serving.worker_ranks
        ]
        self.pull_message = Message(self.num_pull_numbers, self.own_shards)
        self.pieces = [nn.Parameter(tensor) for tensor in self.pull_message.tensors]
        self.trainable = self.pieces
        self._shard_of = {shard.name: shard for shard in self.own_shards}
        self._group_names = group_names(self.model, self.optimizer)
        _keep(self.model, self.optimizer, self.own_shards, self.pieces)

    def serve_step(self, requests: Requests) -> None:
        """Begin a step, in which this server receives gradients and computes none."""
        self.sums.begin(requests)
        self.requests = requests

    def state_dict(self) -> StrategyState:
        """Return this server's rows of the optimiser's state, as shards of the whole."""
        state = self.own_state()
        groups = self.serving.first_servers_groups(self.group, state.optimizer["groups"])
        return replace(state, optimizer={**state.optimizer, "groups": groups})

    def own_state(self) -> StrategyState:
        """Return the same, with this server's own values of the parameter groups."""
        optimizer = optimizer_to_names(self.model, self.optimizer)
        optimizer["state"] = {
            name: _as_pieces(self._shard_of[name], state) for name, state in optimizer["state"].items()
        }
        return StrategyState(model={}, optimizer=optimizer, is_spread=True)

    def load_state_dict(self, source: StateSource) -> None:
        """Load this server's rows of the optimiser's state; rank 0 sends those of the weights."""
        cuts = {
            shard.name: TensorShard(tensor=piece, offsets=shard.offsets, shape=shard.shape)
            for shard, piece in zip(self.own_shards, self.pieces, strict=True)
        }
        source.load_optimizer(self.model, self.optimizer, whole=self._group_names, cuts=cuts)
        message = self.pushes[0]
        self.serving.transport.receive(message.buffer, self.serving.worker_ranks[0]).wait()
        with torch.no_grad():
            for piece, values in zip(self.pieces, message.tensors, strict=True):
                piece.copy_(values)

    def needs(self) -> Needs:
        """Return a request for this server's rows of the optimiser's state; the weights come from a worker."""
        return Needs(
            model={}, optimizer={shard.name: Rectangle(shard.offsets, shard.sizes) for shard in self.own_shards}
        )

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


def _keep(model: nn.Module, optimizer: Optimizer, shards: Sequence[Shard], pieces: Sequence[nn.Parameter]) -> None:
    """Replace whole parameters by rows, in the model and in the optimiser, and release the wholes.

    The optimiser object itself is kept, because the constructor's arguments for another one are unknown. The model
    keeps every name, so that lookups by name work.
    """
    wholes = dict(model.named_parameters())
    kept: dict[int, tuple[nn.Parameter, Shard]] = {}
    for shard, piece in zip(shards, pieces, strict=True):
        whole = wholes[shard.name]
        vars(piece).update(own_attributes(whole))
        with torch.no_grad():
            piece.copy_(shard.of(whole))
        kept[id(whole)] = piece, shard
    state: defaultdict[Any, Any] = defaultdict(dict)
    for held, values in optimizer.state.items():  # some optimisers have state from the start (Adagrad)
        if id(held) in kept:
            piece, shard = kept[id(held)]
            state[piece] = map_tensors(_rows_of(shard, values), torch.clone)
    optimizer.state = state
    for group in optimizer.param_groups:
        group["params"] = [kept[id(whole)][0] for whole in group["params"] if id(whole) in kept]
    for module in list(model.modules()):
        for name, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            piece = kept[id(whole)][0] if id(whole) in kept else nn.Parameter(whole.new_empty(0), requires_grad=False)
            module.register_parameter(name, piece)


def _rows_of(shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
    """Cut a parameter's state to a shard's rows: values with the parameter's shape are per element."""
    rows: dict[str, Any] = map_tensors(
        dict(state), lambda tensor: shard.of(tensor) if tuple(tensor.shape) == shard.shape else tensor
    )
    return rows


def _as_pieces(shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shard's state with its position in the whole parameter's."""

    def as_shard(tensor: Tensor) -> Any:
        is_of_elements = shard.shape and tuple(tensor.shape) == shard.sizes
        return TensorShard(tensor=tensor, offsets=shard.offsets, shape=shard.shape) if is_of_elements else tensor

    pieces: dict[str, Any] = map_tensors(dict(state), as_shard)
    return pieces
