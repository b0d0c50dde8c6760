"""Finder of the module `horovod` for scripts that `dure run --as horovod` starts."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAME, _OWN = "horovod", "dure.compat.horovod"
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
_OTHER_FRAMEWORKS = ("tensorflow", "keras", "mxnet", "spark", "ray")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader that gives `horovod.x` the module `dure.compat.horovod.x`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a module of Horovod's name, or None for any other."""
        if fullname != _NAME and not fullname.startswith(f"{_NAME}."):
            return None
        part = fullname.removeprefix(_NAME).removeprefix(".").partition(".")[0]
        if part in _OTHER_FRAMEWORKS:
            raise ModuleNotFoundError(
                f"{fullname} is not part of dure's Horovod, which is for PyTorch: use horovod.torch", name=fullname
            )
        own = _own_name(fullname)
        try:
            found = importlib.util.find_spec(own)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=found.origin, is_package=bool(found.submodule_search_locations)
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return dure's module itself, so that its classes are the same by either name."""
        module = importlib.import_module(_own_name(spec.name))
        spec.loader_state = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own attributes, which the import system has replaced."""
        state: Any = module.__spec__.loader_state if module.__spec__ else None
        if state is not None:
            module.__spec__, module.__loader__ = state


def _own_name(name: str) -> str:
    """Return dure's name of a module of Horovod."""
    return _RENAMED.get(name, _OWN + name.removeprefix(_NAME))


def install() -> None:
    """Let `import horovod` find this package in this process, and set horovodrun's variables."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, source in _RANKS.items():
        if source in os.environ:
            os.environ.setdefault(name, os.environ[source])
    os.environ.setdefault("HOROVOD_CONTROLLER", "gloo")
    os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
