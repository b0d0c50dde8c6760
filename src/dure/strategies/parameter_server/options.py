"""Options of parameter_server."""

from typing import Literal

from pydantic import Field

from dure.spec.options import StrategyOptions


class ParameterServerOptions(StrategyOptions):
    """Number of servers, transport of messages, and synchrony of workers."""

    servers: int | None = Field(
        None, gt=0, description="processes that keep the parameters (default: as many as nproc)"
    )
    transport: Literal["c10d", "rpc"] = Field("c10d", description="how messages travel; rpc unpickles what peers send")
    sync: bool = Field(True, description="all take each step together; without it at their own pace")
    staleness: int | None = Field(
        None, ge=0, description="without sync: most steps ahead of the slowest worker (default: any)"
    )
