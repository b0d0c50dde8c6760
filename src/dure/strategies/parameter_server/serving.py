"""Division of a model over parameter servers: the rows of each, and the transport between workers and servers.

Li et al. 2014 (section 3) divide the parameters over servers by range; Dean et al. 2012 (section 4) let every worker
push and pull at its own pace; Ho et al. 2013 bound how far the fastest may be ahead. Here ranks 0 to N-1 are workers
with a device each, and the ranks after them servers without one. `sync` takes every step together and is exact;
`async_worker` and `async_server` (without `sync`) are not.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.errors import SpecInvalid, TaskInvalid
from dure.spec import RunSpec
from dure.strategies.division.optimizer_trial import faults_of_parts, reason_not_to_cut, reason_of_classes
from dure.strategies.division.step_hooks import refuse_later_hooks
from dure.strategies.parameter_server.options import ParameterServerOptions
from dure.strategies.parameter_server.shards import Shard, plan_shards
from dure.strategies.parameter_server.transport import C10dTransport, Transport
from dure.strategies.state.common_buffers import common_buffers
from dure.strategies.state.tensor_shard import whole_buffers

_CANNOT = "cannot be divided over servers"


class Serving:
    """Workers and servers of a run, the rows of each server, and the transport of messages."""

    def __init__(self, group: Group, spec: RunSpec) -> None:
        self.everyone = group
        self._spec = spec
        self._options = ParameterServerOptions.of(spec)
        self.num_workers = num_workers_of(group.world_size, self._options)
        self.worker_ranks = range(self.num_workers)
        self.server_ranks = range(self.num_workers, group.world_size)
        self.shards: list[list[Shard]] = []
        """Rows of the parameters that each server keeps."""
        self.are_tensors_cut = False
        """True if a parameter's rows may be on several servers."""

    def divide(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Send rank 0's weights to all ranks, divide the optimiser's parameters, and open the transport.

        Raises:
            TaskInvalid: The optimiser needs all parameters together.
        """
        if faults := faults_of_servers(optimizer):
            raise TaskInvalid("; ".join(faults))
        refuse_later_hooks(optimizer)
        broadcast_through_host([*model.parameters(), *model.buffers()], self.everyone)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        served = [(name, p) for name, p in model.named_parameters() if id(p) in stepped]
        self.are_tensors_cut = reason_not_to_cut(optimizer) is None
        self.shards = plan_shards(served, len(self.server_ranks), cuts_tensors=self.are_tensors_cut)
        self.transport = self._open_transport()

    def _open_transport(self) -> Transport:
        if self._options.transport == "c10d":
            return C10dTransport()
        from dure.strategies.parameter_server.rpc_transport import RpcTransport

        is_worker = self.everyone.rank in self.worker_ranks
        peers = self.server_ranks if is_worker else self.worker_ranks
        return RpcTransport(self.everyone, peers, timeout_seconds=self._spec.timeout_seconds)

    def broadcast_buffers(self, model: nn.Module, group: Group) -> None:
        """Send rank 0's buffers to the ranks of a group: each worker has its own BatchNorm statistics."""
        broadcast_through_host(common_buffers(model, group), group)

    def follow_shapes(self, model: nn.Module) -> None:
        """Resize buffers to the shapes of rank 0's: on a server no call of the model resizes them."""
        kinds = {
            name: None if buffer is None else [str(buffer.dtype).removeprefix("torch."), list(buffer.shape)]
            for name, buffer in whole_buffers(model).items()
        }
        device = next((parameter.device for parameter in model.parameters()), None)
        for name, kind in self.everyone.all_gather_json(kinds)[0].items():
            if kind is not None and kind != kinds[name]:
                path, _, own = name.rpartition(".")
                buffer = torch.empty(kind[1], dtype=getattr(torch, kind[0]), device=device)
                model.get_submodule(path)._buffers[own] = buffer

    def declared(self, texts: Sequence[str]) -> list[str]:
        """Drop notes about several workers if there is one, and about asynchrony if steps are synchronous."""
        if self.num_workers == 1:
            return []
        return [text for text in texts if not (self._options.sync and text.startswith("without sync"))]

    def first_servers_groups(self, group: Group, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter groups with the plain values of the first server's optimiser.

        Args:
            group: Participating ranks.
            groups: Groups of this rank.

        Communication: one gathered JSON message of about 500 bytes per group.
        """
        is_first = self.everyone.rank == self.server_ranks[0]
        mine = [{key: value for key, value in each.items() if _is_plain(value)} for each in groups]
        gathered = group.all_gather_json(mine if is_first else None)
        theirs = next(values for values in gathered if values is not None)
        return [{**each, **values} for each, values in zip(groups, theirs, strict=True)]

    def close(self, living: Group) -> None:
        """Close the transport."""
        self.transport.close(is_whole=living.world_size == self.everyone.world_size)


def broadcast_through_host(tensors: Iterable[Tensor], group: Group) -> None:
    """Overwrite with rank 0's values, through host memory: servers have no device."""
    full = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not full:
        return
    host = [tensor.cpu() for tensor in full]
    group.broadcast(host)
    for tensor, values in zip(full, host, strict=True):
        if tensor is not values:
            tensor.copy_(values)


def faults_of_servers(optimizer: Optimizer) -> list[str]:
    """Return why an optimiser cannot be divided over servers: none has all parameters, nor the model's own objects."""
    if faults := faults_of_parts(optimizer, _CANNOT):
        return faults
    reason = reason_of_classes(optimizer)
    return [] if reason is None else [f"the optimiser {type(optimizer).__name__} {_CANNOT}, because {reason}: use ddp"]


def num_workers_of(world_size: int, options: ParameterServerOptions) -> int:
    """Return the number of ranks that are workers: all except the servers, by default half of them.

    Raises:
        SpecInvalid: There would be none.
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
