"""Objects that are not searched for state: those of Python's own machinery, of engines, of C extensions."""

import sys
import threading
import weakref
from functools import partial

from dure.strategies.state.objects.namespaces import is_users, with_dict

_LOOKED_INTO = (partial, threading.local, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_LOOKED_INTO_PACKAGES = ("argparse", "builtins", "collections", "itertools", "random", "types", "__main__")
"""Python's own packages whose objects hold plain state."""
# fmt: off
_HARMLESS = frozenset((
    # locks, threads, processes, files and connections
    "_asyncio", "_io", "_socket", "_sqlite3", "_ssl", "_thread", "asyncio", "bz2", "concurrent", "gzip", "http",
    "io", "logging", "lzma", "select", "selectors", "signal", "smtplib", "socket", "sqlite3", "ssl", "subprocess",
    "tarfile", "tempfile", "threading", "urllib", "zipfile",
    # values that never change, and definitions
    "_abc", "_csv", "_operator", "_struct", "abc", "ast", "codecs", "contextlib", "copyreg", "csv", "dataclasses",
    "datetime", "decimal", "email", "enum", "fractions", "functools", "importlib", "inspect", "ipaddress", "json",
    "locale", "numbers", "operator", "os", "pathlib", "posix", "re", "string", "struct", "textwrap", "time",
    "traceback", "typing", "uuid", "warnings", "weakref", "xml", "zoneinfo",
))
# fmt: on
_ENGINES = ("torch.distributed", "torch._ops", "torch._library")
"""Packages of torch whose objects are machinery: groups, and user-defined operators."""
_RECORDERS = ("comet_ml", "mlflow", "tensorboard", "tensorboardX", "torch.utils.tensorboard", "wandb")
"""Packages whose objects write records of a run: what these contain is no state, and must not be put back."""
_HARMLESS_MODULES = tuple(
    f"multiprocessing.{name}" for name in ("connection", "context", "pool", "process", "synchronize")
)


def is_foreign(value: object) -> bool:
    """Return whether an object belongs to an engine that has put it into a module, or to Python's own machinery."""
    module = type(value).__module__
    package = module.partition(".")[0]
    if isinstance(value, _LOOKED_INTO):
        return False
    if isinstance(value, threading.Thread):
        return True
    is_pythons = package in sys.stdlib_module_names and package not in _LOOKED_INTO_PACKAGES
    return is_pythons or module.startswith(_ENGINES) or _is_recorder(module)


def _is_recorder(module: str) -> bool:
    return f"{module}.".startswith(tuple(f"{package}." for package in _RECORDERS))


def hides_state(value: object) -> bool:
    """Return whether an opaque object may have state: whether it is no lock, file, connection or constant."""
    module = type(value).__module__
    package = module.partition(".")[0]
    if package in ("builtins", "torch", "numpy"):
        return isinstance(value, memoryview)
    if _is_recorder(module):
        return False
    if is_foreign(value):
        return package not in _HARMLESS and not module.startswith((*_HARMLESS_MODULES, *_ENGINES[1:]))
    return with_dict(value) is None and not is_users(type(value))
