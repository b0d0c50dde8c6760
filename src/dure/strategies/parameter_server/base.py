"""Parameter servers: workers compute gradients, servers keep the parameters and step them.

Li et al. 2014 (section 3) divide the parameters over servers by range; Dean et al. 2012 (section 4) let every worker
push and pull at its own pace; Ho et al. 2013 bound how far the fastest may be ahead. Here ranks 0 to N-1 are workers
with a device each, and the ranks after them servers without one. `sync` takes every step together and is exact;
`async_worker` and `async_server` (without `sync`) are not. This file is what both have in common: who keeps which rows,
an optimiser over rows, and how a checkpoint comes together.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.errors import SpecInvalid, TaskInvalid
from dure.spec import RunSpec
from dure.strategies.contract.batches import Microbatch, map_tensors
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.step_facts import Requests
from dure.strategies.contract.strategy import Strategy
from dure.strategies.division.optimizer_trial import faults_of_parts, reason_not_to_cut
from dure.strategies.division.step_hooks import refuse_later_hooks
from dure.strategies.parameter_server.options import ParameterServerOptions
from dure.strategies.parameter_server.shards import Message, Shard, plan_shards
from dure.strategies.parameter_server.transport import C10dTransport, Transport
from dure.strategies.state.common_buffers import common_buffers
from dure.strategies.state.optimizer import group_names, optimizer_to_names
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.strategies.state.tensor_shard import Needs, Rectangle, TensorShard, whole_buffers
from dure.torchcompat import own_attributes
from dure.units import format_bytes


class ServedRank(Strategy):
    """Base of the roles that a rank can have: worker or server, with every step together or at its own pace."""

    options: ParameterServerOptions

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.everyone = context.group
        self.num_workers = num_workers_of(self.everyone.world_size, self.options)
        self.worker_ranks = range(self.num_workers)
        self.server_ranks = range(self.num_workers, self.everyone.world_size)
        self.data_world_size = self.num_workers
        self.waits_for_facts = True
        self.requests = Requests()

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Refuse sparse gradients."""
        return [
            f"{name} gives sparse gradients (sparse=True), and servers keep dense rows: use ddp or naive_ddp"
            for name, module in model.named_modules()
            if getattr(module, "sparse", False) is True
        ]

    @classmethod
    def check_optimizer(cls, optimizer: Optimizer) -> list[str]:
        """Refuse an optimiser that needs all parameters together: no server has them."""
        return faults_of_parts(optimizer, "cannot be divided over servers")

    def distribute(self) -> None:
        """Begin with rank 0's weights everywhere, and share out what the optimiser steps."""
        if faults := self.check_optimizer(self.optimizer):
            raise TaskInvalid("; ".join(faults))
        refuse_later_hooks(self.optimizer)
        super().distribute()
        self._broadcast([*self.model.parameters(), *self.model.buffers()], self.everyone)
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}
        served = [(name, p) for name, p in self.model.named_parameters() if id(p) in stepped]
        self.are_tensors_cut = reason_not_to_cut(self.optimizer) is None
        self.shards = plan_shards(served, len(self.server_ranks), cuts_tensors=self.are_tensors_cut)
        self.transport = self._open_transport()

    def _open_transport(self) -> Transport:
        if self.options.transport == "c10d":
            return C10dTransport()
        from dure.strategies.parameter_server.rpc_transport import RpcTransport

        is_worker = self.everyone.rank in self.worker_ranks
        peers = self.server_ranks if is_worker else self.worker_ranks
        return RpcTransport(self.everyone, peers, timeout_seconds=self.spec.timeout_seconds)

    def _broadcast(self, tensors: Iterable[Tensor], group: Group) -> None:
        """Take rank 0's values, through host memory: servers have no device."""
        full = [tensor.detach() for tensor in tensors if tensor.numel()]
        if not full:
            return
        host = [tensor.cpu() for tensor in full]
        group.broadcast(host)
        for tensor, values in zip(full, host, strict=True):
            if tensor is not values:
                tensor.copy_(values)

    def before_reading(self) -> None:
        """Send rank 0's buffers to all: each worker has BatchNorm statistics of its own."""
        self._follow_shapes()
        self._broadcast(common_buffers(self.model, self.everyone), self.everyone)

    def _follow_shapes(self) -> None:
        """Make room for rank 0's buffers: no call of the model lets a server's grow."""
        kinds = {
            name: None if buffer is None else [str(buffer.dtype).removeprefix("torch."), list(buffer.shape)]
            for name, buffer in whole_buffers(self.model).items()
        }
        device = next((parameter.device for parameter in self.model.parameters()), None)
        for name, kind in self.everyone.all_gather_json(kinds)[0].items():
            if kind is not None and kind != kinds[name]:
                path, _, own = name.rpartition(".")
                buffer = torch.empty(kind[1], dtype=getattr(torch, kind[0]), device=device)
                self.model.get_submodule(path)._buffers[own] = buffer

    def not_preserved(self) -> list[str]:
        """Leave out what concerns several workers where there is one, and the pace where steps are taken together."""
        texts = super().not_preserved() if self.num_workers > 1 else []
        return [text for text in texts if not (self.options.sync and text.startswith("without sync"))]

    def close(self) -> None:
        """Let go of the transport."""
        self.transport.close(is_whole=self.group.world_size == self.everyone.world_size)

    def _first_servers_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter groups with the plain values that the first server's optimiser has in them.

        Communication: one gathered JSON message of about 500 bytes per group.
        """
        is_first = self.everyone.rank == self.server_ranks[0]
        mine = [{key: value for key, value in group.items() if _is_plain(value)} for group in groups]
        said = self.group.all_gather_json(mine if is_first else None)
        theirs = next(values for values in said if values is not None)
        return [{**group, **values} for group, values in zip(groups, theirs, strict=True)]


def num_workers_of(world_size: int, options: ParameterServerOptions) -> int:
    """Return how many of the ranks are workers: all that are no servers, half of them unless said otherwise.

    Raises:
        SpecInvalid: None would be.
    """
    num_servers = options.servers or world_size // 2
    if not 0 < num_servers < world_size:
        raise SpecInvalid(
            [
                f"{world_size} process(es), {num_servers} of them servers, leave no worker: set "
                "--parameter-server.servers lower"
            ]
        )
    return world_size - num_servers


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


class Worker(ServedRank):
    """A rank with a device: computes on its share, pushes gradients and pulls parameters."""

    undoes_writes = True
    follows_groups = False

    num_push_numbers: int
    """Numbers in front of the gradients of a push."""
    num_pull_numbers: int

    def distribute(self) -> None:
        """Lay out a push and a pull for each server; the optimiser keeps no state here."""
        super().distribute()
        self.optimizer.state.clear()  # some have it from the start (Adagrad): the servers do, too
        parameters = dict(self.model.named_parameters())
        is_pinned = self.device.type == "cuda"
        self.pushes, self.pulls = [], []
        for shards in self.shards:
            # behind the numbers, whether each shard got a gradient at all
            self.pushes.append(Message(self.num_push_numbers + len(shards), shards, is_pinned=is_pinned))
            self.pulls.append(Message(self.num_pull_numbers, shards, is_pinned=is_pinned))
        self._served = [[(parameters[shard.name], shard) for shard in shards] for shards in self.shards]

    def describe(self) -> list[str]:
        """Say who keeps what."""
        sizes = ", ".join(format_bytes(sum(shard.num_bytes for shard in shards)) for shards in self.shards)
        cut = "cut by rows" if self.are_tensors_cut else "by whole tensors: the optimiser needs them whole"
        return [f"{self.num_workers} worker(s), {len(self.shards)} server(s) with {sizes} of parameters, {cut}"]

    def known_facts(self) -> list[float]:
        """Return this worker's `[loss sum, count, stop, save]` as numbers."""
        facts = self.sums.facts()
        return facts.tolist() if isinstance(facts, Tensor) else list(facts)

    def write_gradients(self) -> None:
        """Write the gradients into the pushes, and whether there was one for each shard."""
        for push, served in zip(self.pushes, self._served, strict=True):
            used = push.numbers[self.num_push_numbers :]
            for position, ((parameter, shard), target) in enumerate(zip(served, push.tensors, strict=True)):
                if parameter.grad is None:
                    target.zero_()
                    used[position] = 0.0
                else:
                    target.copy_(shard.of(parameter.grad), non_blocking=True)
                    used[position] = 1.0
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def push(self) -> None:
        """Send the pushes.

        Communication: one message to each server, its shards' bytes and some numbers; waits until all are through.
        """
        under_way = [
            self.transport.send(m.buffer, rank) for m, rank in zip(self.pushes, self.server_ranks, strict=True)
        ]
        for message in under_way:
            message.wait()

    def pull(self) -> None:
        """Receive the parameters.

        Communication: one message from each server, its shards' bytes and some numbers; waits for all.
        """
        receive = self.transport.receive
        under_way = [receive(m.buffer, rank) for m, rank in zip(self.pulls, self.server_ranks, strict=True)]
        with torch.no_grad():
            for message, pull, served in zip(under_way, self.pulls, self._served, strict=True):
                message.wait()
                for (parameter, shard), values in zip(served, pull.tensors, strict=True):
                    shard.of(parameter).copy_(values, non_blocking=True)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # the next pull overwrites what is copied from

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of the pushes."""
        return sum(push.num_bytes for push in self.pushes)

    def state_dict(self) -> StrategyState:
        """Return the weights, which the servers had sent, and the groups; the optimiser's state is the servers'."""
        optimizer = optimizer_to_names(self.model, self.optimizer)
        optimizer["groups"] = self._first_servers_groups(optimizer["groups"])
        return self._with_weights(optimizer)

    def own_state(self) -> StrategyState:
        """Return the same without the values of the groups, which are the servers' to know."""
        optimizer = optimizer_to_names(self.model, self.optimizer)
        optimizer["groups"] = [{"params": group["params"]} for group in optimizer["groups"]]
        return self._with_weights(optimizer)

    def _with_weights(self, optimizer: dict[str, Any]) -> StrategyState:
        model = self.model.state_dict() if self.group.rank == 0 else {}
        return StrategyState(model=model, optimizer=optimizer, is_spread=True)

    def load_state_dict(self, source: StateSource) -> None:
        """Take over the weights, and give the servers theirs."""
        source.load_model(self.model)
        source.load_optimizer(self.model, self.optimizer, has_state=False)
        if self.everyone.rank > 0:
            return
        for push, served in zip(self.pushes, self._served, strict=True):
            for (parameter, shard), target in zip(served, push.tensors, strict=True):
                target.copy_(shard.of(parameter.detach()))
        self.push()

    def needs(self) -> Needs:
        """Return the weights: the optimiser's state is the servers'."""
        return replace(super().needs(), optimizer={})


class Server(ServedRank):
    """A rank without a device: keeps some rows of the parameters, and steps them."""

    num_push_numbers: int
    num_pull_numbers: int

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.takes_samples = self.leads_share = False
        self.data_rank = 0
        self.number = context.group.rank - self.num_workers
        """Index of this server among the servers."""

    def distribute(self) -> None:
        """Keep this server's rows, in the message that sends them, and let the rest of the model go."""
        super().distribute()
        self.own_shards = self.shards[self.number]
        self.pushes = [
            Message(self.num_push_numbers + len(self.own_shards), self.own_shards) for _ in self.worker_ranks
        ]
        self.pull_message = Message(self.num_pull_numbers, self.own_shards)
        self.pieces = [nn.Parameter(tensor) for tensor in self.pull_message.tensors]
        self.trainable = self.pieces
        self._shard_of = {shard.name: shard for shard in self.own_shards}
        self._group_names = group_names(self.model, self.optimizer)
        _keep(self.model, self.optimizer, self.own_shards, self.pieces)

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Let the step's batches pass, which are empty hands here."""
        self.sums.begin(requests)
        self.requests = requests
        for _ in microbatches:
            pass

    def state_dict(self) -> StrategyState:
        """Return this server's rows of the optimiser's state, as pieces of the whole."""
        state = self.own_state()
        return replace(
            state, optimizer={**state.optimizer, "groups": self._first_servers_groups(state.optimizer["groups"])}
        )

    def own_state(self) -> StrategyState:
        """Return the same with this server's own values of the groups."""
        optimizer = optimizer_to_names(self.model, self.optimizer)
        optimizer["state"] = {
            name: _as_pieces(self._shard_of[name], state) for name, state in optimizer["state"].items()
        }
        return StrategyState(model={}, optimizer=optimizer, is_spread=True)

    def load_state_dict(self, source: StateSource) -> None:
        """Take over this server's rows of the optimiser's state; rank 0 sends those of the weights."""
        cuts = {
            shard.name: TensorShard(tensor=piece, offsets=shard.offsets, shape=shard.shape)
            for shard, piece in zip(self.own_shards, self.pieces, strict=True)
        }
        source.load_optimizer(self.model, self.optimizer, whole=self._group_names, cuts=cuts)
        message = self.pushes[0]
        self.transport.receive(message.buffer, self.worker_ranks[0]).wait()
        with torch.no_grad():
            for piece, values in zip(self.pieces, message.tensors, strict=True):
                piece.copy_(values)

    def needs(self) -> Needs:
        """Return this server's rows of the optimiser's state; the weights come from a worker."""
        return Needs(
            model={}, optimizer={shard.name: Rectangle(shard.offsets, shard.sizes) for shard in self.own_shards}
        )


def _keep(model: nn.Module, optimizer: Optimizer, shards: Sequence[Shard], pieces: Sequence[nn.Parameter]) -> None:
    """Put rows in the place of whole parameters, in the model and in the optimiser, and let the wholes go.

    The optimiser itself goes on, not another of its class: only its maker knows the constructor's arguments.
    The model keeps every name, so that what is found by name is found.
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
    for held, values in optimizer.state.items():  # some have it from the start (Adagrad)
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
    """Cut a parameter's state to a shard's rows: what has the parameter's shape is of its elements."""
    rows: dict[str, Any] = map_tensors(
        dict(state), lambda tensor: shard.of(tensor) if tuple(tensor.shape) == shard.shape else tensor
    )
    return rows


def _as_pieces(shard: Shard, state: Mapping[str, Any]) -> dict[str, Any]:
    """Name a shard's state as what it is of the whole parameter's."""

    def as_shard(tensor: Tensor) -> Any:
        is_of_elements = shard.shape and tuple(tensor.shape) == shard.sizes
        return TensorShard(tensor=tensor, offsets=shard.offsets, shape=shard.shape) if is_of_elements else tensor

    pieces: dict[str, Any] = map_tensors(dict(state), as_shard)
    return pieces
