"""Exceptions of Horovod's interface, by Horovod's place for them."""

from dure.compat.horovod.engine.failures import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
)

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
