"""Name `horovod` for the scripts that `dure run --as horovod` starts."""

import os
from pathlib import Path

from dure.compat.alias import Alias

_RANKS = {
    "HOROVOD_RANK": "RANK",
    "HOROVOD_SIZE": "WORLD_SIZE",
    "HOROVOD_LOCAL_RANK": "LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE": "LOCAL_WORLD_SIZE",
    "HOROVOD_CROSS_RANK": "GROUP_RANK",
    "HOROVOD_CROSS_SIZE": "GROUP_WORLD_SIZE",
}
"""Variables of horovodrun, which scripts read, and those that they are equal to."""
_RENAMED = {"horovod.common.util": "dure.compat.horovod.common.builds"}
"""Modules that dure has by another name."""
_SPAWNED = Path(__file__).parent / "spawned"
_OTHER_FRAMEWORKS = ("tensorflow", "keras", "mxnet", "spark", "ray")


def install() -> None:
    """Let `import horovod` find this package in this process, and set horovodrun's variables."""
    refused = dict.fromkeys(_OTHER_FRAMEWORKS, "it is for PyTorch, so use horovod.torch")
    Alias("horovod", "dure.compat.horovod", renamed=_RENAMED, refused=refused, spawned=_SPAWNED).install()
    for name, source in _RANKS.items():
        if source in os.environ:
            os.environ.setdefault(name, os.environ[source])
    os.environ.setdefault("HOROVOD_CONTROLLER", "gloo")
    os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
