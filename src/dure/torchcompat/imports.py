"""Imports that torch delays, that raise warnings, or of libraries that were made for another torch."""

import importlib
import importlib.metadata
import importlib.util
import re
import traceback
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dure.errors import EnvironmentLacks, message_of


def import_late_parts() -> None:
    """Import modules that torch would import later, at a worse moment. Before a fork and before a process group.

    The first DistributedDataParallel imports `torch._dynamo`: 0.8 to 1.0 s in every rank unless it was imported before
    the fork. That in turn imports `torch.distributed.nn.functional`, whose default arguments then hold the process
    group of that moment, with its store and ports, until the interpreter ends (2.11 and 2.13).
    """
    importlib.import_module("torch.distributed.nn.functional")
    importlib.import_module("torch._dynamo")


def import_distributed_optim() -> ModuleType:
    """Import `torch.distributed.optim`, which raises 67 DeprecationWarnings about `torch.jit` (2.11 and 2.13).

    Unpickling one of its objects, as RPC does, also imports it: import it before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("torch.distributed.optim")


_kept_alive: list[torch.library.Library] = []
"""Library objects, kept because an operator's schema disappears with the object that declared it."""


def repair_torchvision() -> bool:
    """Make `import torchvision` work with a torch build for which its binary part was not made.

    The registry's torchvision 0.28.0 does not load its compiled operators with torch 2.13.0+cpu, and its import then
    fails with `operator torchvision::nms does not exist`. Declaring the two schemas to which the import refers is
    enough for models, transforms and data sets; the operators themselves stay missing. Does nothing if torchvision is
    missing or intact, or if called again.

    Returns:
        Whether schemas were declared.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _has_operator("nms"):
        return False
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            # a later declaration by the library itself would be an error: load the real one first
            torch.ops.load_library(library)
        except OSError:
            continue
    missing = [name for name in ("nms", "qnms") if not _has_operator(name)]
    if "nms" not in missing:
        return False
    declarations = torch.library.Library("torchvision", "DEF")
    for name in missing:
        declarations.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept_alive.append(declarations)
    return True


_SIGNS_OF_ANOTHER_TORCH = re.compile(
    r"operator \w+::\w+ does not exist|undefined symbol: \w*(torch|c10|at)|"
    r"module 'torch[\w.]*' has no attribute|cannot import name '\w+' from 'torch"
)
"""Errors of Python and torch about a library that was made for another version or build of torch."""


def library_for_another_torch(error: BaseException) -> str | None:
    """Return a sentence about a library that is incompatible with this torch, if that caused the error, or None."""
    if not _SIGNS_OF_ANOTHER_TORCH.search(message_of(error)):
        return None
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [found[-1] for file in files if (found := re.findall(r"/(?:site|dist)-packages/([^/.]+)", file))]
    name = next((name for name in reversed(inside) if name not in ("torch", "dure")), None)
    if name is None:
        return None
    try:
        version = f" {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return (
        f"{name}{version} does not fit torch {torch.__version__} ({error}): install a pair that was made together, "
        f"as `pip install --upgrade torch {name}` does"
    )


def import_torchvision() -> ModuleType:
    """Import torchvision, repaired if its binary part does not fit this torch.

    Raises:
        EnvironmentLacks: torchvision is not installed.
    """
    repair_torchvision()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("torchvision", "PIL"):
            raise
        raise EnvironmentLacks(
            f"{error.name} is not installed, but this task needs torchvision: pip install 'dure[vision]'"
        ) from None


def _has_operator(name: str) -> bool:
    namespace: Any = torch.ops.torchvision
    return hasattr(namespace, name)
