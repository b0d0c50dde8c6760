"""Choice of a rank's role under a parameter server."""

from torch import nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.spec import RunSpec
from dure.strategies.contract.strategy import Strategy
from dure.strategies.parameter_server.async_server import AsyncServer
from dure.strategies.parameter_server.async_worker import AsyncWorker
from dure.strategies.parameter_server.options import ParameterServerOptions
from dure.strategies.parameter_server.serving import faults_of_servers, num_workers_of
from dure.strategies.parameter_server.sync import SyncServer, SyncWorker


class ParameterServer(Strategy):
    """Entry in the table of strategies; no rank uses this class itself."""

    options: ParameterServerOptions

    @classmethod
    def role_for(cls, group: Group, spec: RunSpec) -> type[Strategy]:
        """Return the class of a worker or a server, synchronous or asynchronous."""
        options = ParameterServerOptions.of(spec)
        worker, server = (SyncWorker, SyncServer) if options.sync else (AsyncWorker, AsyncServer)
        return server if group.rank >= num_workers_of(group.world_size, options) else worker

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
        """Refuse an optimiser that needs all parameters together: no server has all of them."""
        return faults_of_servers(optimizer)
