"""Registration of the backend `dure_shm` with torch.distributed, without importing torch before it is needed."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_BACKENDS = "torch.distributed.distributed_c10d"
"""Module that holds the names of the backends."""


def register_backend() -> None:
    """Register now if torch.distributed was imported, otherwise as soon as it is."""
    if _BACKENDS in sys.modules:
        _register(sys.modules[_BACKENDS])
    elif not any(isinstance(finder, _Expectant) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Expectant())


def _register(backends: ModuleType) -> None:
    if "dure_shm" not in backends.Backend.backend_list:
        backends.Backend.register_backend("dure_shm", _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, unused: Any = None) -> Any:
    from dure.comm.dure_shm.backend import create_group  # imports torch, and more of dure

    return create_group(options)


class _Expectant(MetaPathFinder):
    """Finder that finds nothing itself, but makes the one module register the backend after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders have for the module, extended by the registration."""
        if fullname != _BACKENDS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
