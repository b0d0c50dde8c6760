"""Exceptions of Horovod's interface."""


class HorovodInternalError(RuntimeError):
    """Failure of a collective. `elastic.run` restores the last commit and starts the function again."""


class HostsUpdatedInterrupt(RuntimeError):
    """Notice that the hosts of the job have changed. `elastic.run` starts the function again without a restore."""

    def __init__(self, skip_sync: bool) -> None:
        self.skip_sync = skip_sync
        """True if ranks were only removed, so that the state needs no synchronisation."""


class HorovodVersionMismatchError(ImportError):
    """Difference between the framework at installation and at run time; never raised here, where nothing is built."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is {version} but was {installed_version} at the installation")
        self.name = name
        self.version = version
        self.installed_version = installed_version
