"""Names of what is observed in a script: its lines, and its parameters without those of wrappers."""

import sys
import sysconfig
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_INSTALLED = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[2]))
"""Folders of code that is not the script's."""
_WRAPPING = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def line_of_script() -> str:
    """Return as `file:line` the innermost line of the script's folder, or else one that is not of an installation."""
    frame: Any = sys._getframe(1)
    folder = str(Path(getattr(sys.modules["__main__"], "__file__", None) or ".").absolute().parent)
    elsewhere = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(("<", *_INSTALLED)) and "site-packages" not in path:
            line = f"{path}:{frame.f_lineno}"
            if str(Path(path).absolute()).startswith(folder):
                return line
            elsewhere = elsewhere or line
        frame = frame.f_back
    return elsewhere


def plain(name: str) -> str:
    """Return the name of a parameter without those of wrappers."""
    for wrapping in _WRAPPING:
        name = name.replace(wrapping, "")
    return name


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers of a model by their names without those of wrappers."""
    both = [*module.named_parameters(), *module.named_buffers()]
    return {plain(name): tensor for name, tensor in both}
