"""Module whose gradients, or changes of weights, go to parameter servers: the last ranks of a group."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dure.comm.buckets import check_gradient
from dure.comm.groups import ProcessGroup
from dure.errors import EnvironmentLacks, PeerLost, TaskInvalid
from dure.host.backends import takes_devices_only
from dure.parallel.servers import GOES_ON, LEAVES, UNEVEN, UNEVEN_TEXT, AsyncService, serve_together
from dure.parallel.wrapping import RankWrapper, Trained, check_alike, only_device, send_tensors
from dure.strategies.parameter_server.exchange import Exchange
from dure.strategies.parameter_server.serving import broadcast_through_host
from dure.strategies.parameter_server.shards import Message, plan_shards
from dure.strategies.parameter_server.transport import C10dTransport
from dure.torchcompat.gradients import call_after_backward


class ParameterServerDDP(RankWrapper):
    """Model of workers, which are the first ranks, with servers, which are the last.

    Each server has rows of all parameters. With `sync`, workers push gradients while they wait, and pull their mean:
    the result is that of `DistributedDataParallel`, up to rounding. Without it, no worker waits for another: after each
    step of its optimiser it pushes how far that has moved the weights, the server moves its own by that over the number
    of workers, and the worker goes on from the server's weights. That is not what one process computes.

    A server calls `serve`, which returns when every worker has called `close`. Workers divide the data over
    `num_workers`, and use the group `workers` for collectives of their own, because servers take part in none.

    Source: Li et al. 2014 for the rows of servers; Dean et al. 2012 (section 4.1) for pushes without waiting; Ho et al.
    2013 (section 3) for the bound on steps ahead.
    """

    _of_rank = frozenset(
        {"_exchange", "_hooks", "_is_running", "_known", "_pulled", "_shards", "_trained", "_transport"}
        | {"_workers", "workers"}
    )

    def __init__(
        self,
        module: nn.Module,
        *,
        servers: int = 1,
        sync: bool = True,
        staleness: int | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        """Send rank 0's weights to all ranks, and divide them over the servers.

        Args:
            module: Model, on one device; on a server it may be on the CPU.
            servers: Number of servers.
            sync: Whether all workers take each step together.
            staleness: Without `sync`, the most steps that a worker may be ahead of the slowest; None for any number.
            broadcast_buffers: Whether rank 0's buffers are sent to the other workers with the gradients, with `sync`.

        Raises:
            EnvironmentLacks: There is no process group yet, or its backend sends nothing from host memory.
            TaskInvalid: There would be no worker or no server, or the model has nothing to train, sparse gradients, or
                parameters on several devices.
        """
        super().__init__(module)
        if takes_devices_only(dist.get_backend()):
            raise EnvironmentLacks(
                "ParameterServerDDP sends from host memory, which this backend cannot: begin with "
                'init_process_group("gloo"), or name gloo for the CPU beside another backend'
            )
        world_size = dist.get_world_size()
        if not 0 < servers < world_size:
            raise TaskInvalid(
                f"servers is {servers} and the group has {world_size} rank(s): at least one must be a worker, and one "
                "a server"
            )
        if staleness is not None and (sync or staleness < 0):
            raise TaskInvalid(f"staleness is {staleness}, and must be at least 0, together with sync=False")
        self.num_workers = world_size - servers
        self.is_server = dist.get_rank() >= self.num_workers
        self._sync, self._staleness = sync, staleness
        self._known = Trained(module, "ParameterServerDDP")
        self._trained = self._known.parameters
        device = only_device(module, self._trained, "ParameterServerDDP")
        host = ProcessGroup(torch.device("cpu"))
        check_alike(host, module, "ParameterServerDDP")
        self.workers: Any = dist.new_group(range(self.num_workers))
        """Group of the workers; on a server it has no use."""
        with torch.no_grad():
            broadcast_through_host([*module.parameters(), *module.buffers()], host)
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._server_ranks = range(self.num_workers, world_size)
        self._shards = plan_shards(named, servers)
        self._transport = C10dTransport()
        self._is_running: Callable[[], bool] = lambda: False
        """Function that tells whether the backward after which gradients are sent has not ended."""
        self._hooks: list[Any] = []
        self._broadcasts_buffers = broadcast_buffers and sync
        if not self.is_server:
            self._begin_work(dict(named), device)

    def _begin_work(self, named: dict[str, nn.Parameter], device: torch.device) -> None:
        self._workers = ProcessGroup(device, self.workers)
        self._exchange = Exchange(
            self._transport,
            self._server_ranks,
            self._shards,
            named,
            num_push_numbers=1,
            num_pull_numbers=1,
            device=device,
            are_pulls_flagged=True,
        )
        if self._sync:
            self._hooks = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in self._trained]
            return
        self._pulled = {id(parameter): parameter.detach().clone() for parameter in self._trained}
        for each in (self, self.module):
            each.register_load_state_dict_pre_hook(_refuse_loading)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Call the model; in training without `sync`, the worker's last step is sent first.

        Raises:
            TaskInvalid: This rank is a server, or has left the servers, or trains other parameters than at the start.

        Communication: none with `sync`; without it, a push and a pull after each step.
        """
        if self.is_server:
            raise TaskInvalid("this rank is a parameter server: call serve() in place of the training loop")
        if self._is_copy:
            return self.module(*inputs, **keywords)
        if torch.is_grad_enabled() and self._is_open:
            self._known.check(self.module)
        elif torch.is_grad_enabled() and self.training:
            raise TaskInvalid("ParameterServerDDP is closed, and sends nothing more: train its module, or wrap it")
        if not self._sync and self._is_open and self.training and torch.is_grad_enabled() and self._synchronises:
            self._send_step()
        return self.module(*inputs, **keywords)

    def close(self) -> None:
        """Leave the servers, and wait for the other workers to do so; without `sync`, all get the same last weights.

        A second call does nothing.
        """
        if self.is_server or not self._is_open:
            return
        self._is_open = False
        for hook in self._hooks:
            hook.remove()
        self._exchange.write((lambda parameter: None) if self._sync else self._movement)
        self._trade(LEAVES)

    def serve(self) -> None:
        """Serve the workers until all have left.

        Raises:
            TaskInvalid: This rank is a worker, or workers have made different numbers of steps.
            PeerLost: A worker has ended without `close`; without `sync`, all have.
        """
        if not self.is_server:
            raise TaskInvalid("this rank is a worker: write its training loop, and call close() at its end")
        if not self._is_open:
            raise TaskInvalid("serve() has ended, and all workers have left: wrap the model again on all ranks")
        self._is_open = False
        shards = self._shards[dist.get_rank() - self.num_workers]
        pushes = [Message(1 + len(shards), shards) for _ in range(self.num_workers)]
        reply = Message(1 + len(shards), shards)
        if self._sync:
            serve_together(self._transport, pushes, reply)
        else:
            weights = dict(self.module.named_parameters())
            for shard, tensor in zip(shards, reply.tensors, strict=True):
                tensor.copy_(shard.of(weights[shard.name].detach()))
            reply.numbers.fill_(1.0)
            reply.numbers[0] = GOES_ON
            AsyncService(self._transport, pushes, reply, self._staleness).run()

    # workers

    def _note(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            check_gradient(parameter.grad)
        if self._synchronises and not self._is_running():
            self._is_running = call_after_backward(self._send_gradients)

    def _send_gradients(self) -> None:
        self._is_running = lambda: False
        self._exchange.write(lambda parameter: parameter.grad)
        self._trade(GOES_ON)
        if self._broadcasts_buffers:  # now, when no worker can have left
            send_tensors(self._workers, list(self.module.buffers()))

    def _send_step(self) -> None:
        """Push what the optimiser has changed since the last pull, if it has."""
        if not all(torch.equal(self._pulled[id(each)], each.detach()) for each in self._trained):
            self._exchange.write(self._movement)
            self._trade(GOES_ON)

    def _target(self, parameter: Tensor, is_used: bool) -> Tensor | None:
        return _gradient_to_fill(parameter, is_used) if self._sync else parameter.detach()

    def _movement(self, parameter: Tensor) -> Tensor:
        return parameter.detach() - self._pulled[id(parameter)]

    def _trade(self, number: float) -> None:
        """Push, and pull.

        Raises:
            TaskInvalid: Some workers have left, and others have not.
            PeerLost: A server is gone.
        """
        for push in self._exchange.pushes:
            push.numbers[0] = number
        try:
            self._exchange.push()
            self._exchange.pull(self._target if number == GOES_ON or not self._sync else lambda *_: None)
        except RuntimeError as error:
            ranks = ", ".join(map(str, self._server_ranks))
            raise PeerLost(f"a parameter server (of ranks {ranks}) is gone: {error}") from error
        if any(pull.numbers[0].item() == UNEVEN for pull in self._exchange.pulls):
            raise TaskInvalid(UNEVEN_TEXT)
        if not self._sync:
            for parameter in self._trained:
                self._pulled[id(parameter)].copy_(parameter.detach())


def _gradient_to_fill(parameter: Tensor, is_used: bool) -> Tensor | None:
    """Return the gradient that gets the mean; a parameter that no worker has used gets none."""
    if not is_used:
        parameter.grad = None
    elif parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    return parameter.grad


def _refuse_loading(*_: Any) -> None:
    raise TaskInvalid(
        "without sync each worker's change of the weights is added up, so load a state before the model is wrapped"
    )
