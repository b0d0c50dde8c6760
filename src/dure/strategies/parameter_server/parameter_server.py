"""Choice of a rank's role under a parameter server."""

from dure.comm.groups import Group
from dure.spec import RunSpec
from dure.strategies.contract.strategy import Strategy
from dure.strategies.parameter_server.async_server import AsyncServer
from dure.strategies.parameter_server.async_worker import AsyncWorker
from dure.strategies.parameter_server.base import ServedRank, num_workers_of
from dure.strategies.parameter_server.options import ParameterServerOptions
from dure.strategies.parameter_server.sync import SyncServer, SyncWorker


class ParameterServer(ServedRank):
    """Entry in the table of strategies; no rank is of this class itself."""

    @classmethod
    def role_for(cls, group: Group, spec: RunSpec) -> type[Strategy]:
        """Return the class of a worker or a server, which take every step together or not."""
        options = ParameterServerOptions.of(spec)
        worker, server = (SyncWorker, SyncServer) if options.sync else (AsyncWorker, AsyncServer)
        return server if group.rank >= num_workers_of(group.world_size, options) else worker
